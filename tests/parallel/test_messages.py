"""Tests that messages between ranks are JSON, and that no received message is unpickled."""

import contextlib
import pickle
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_pool import PerRank, ProcessPool, pretrain, succeed
from training.runs import Runner

from megatron.parallel.roll_call import describe_places

SIZES = "--num-layers 2 --check-invariants-interval 1 --save-interval 2 --keep-latest-checkpoints 1"
NATIVE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


@contextlib.contextmanager
def unpickled() -> Iterator[list[str]]:
    """Collect where anything is unpickled in this process, by Python or by torch.distributed."""
    import torch.distributed.distributed_c10d as c10d

    found: list[str] = []

    def record(original):
        def call(*args, **kwargs):
            found.append("".join(traceback.format_stack(limit=6)))
            return original(*args, **kwargs)

        return call

    functions = [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (c10d, "_unpickler")]
    originals = [getattr(module, name) for module, name in functions]
    for (module, name), original in zip(functions, originals, strict=True):
        setattr(module, name, record(original))
    try:
        yield found
    finally:
        for (module, name), original in zip(functions, originals, strict=True):
            setattr(module, name, original)


def pretrain_and_count(argv: list[str]) -> tuple[list[str], str]:
    """Train, and return where anything was unpickled and the error of a refused layout."""
    from megatron.base.errors import LayoutError

    with unpickled() as found:
        try:
            pretrain(argv)
        except LayoutError as error:
            return found, str(error)
    return found, ""


def gather_objects() -> int:
    import torch.distributed as dist

    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    with unpickled() as found:
        dist.all_gather_object([None, None], {"a": 1})
    return len(found)


def gather_values(values: list) -> tuple[list, list[str]]:
    import torch.distributed as dist

    from megatron.parallel.messages import gather_json
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    with unpickled() as found:
        return gather_json(values[dist.get_rank()], dist.group.WORLD), found


def leave_out_a_message(victim: int, function: str) -> dict[int, list[str]]:
    """Exchange two messages by a method of `Ranks`, of which one rank leaves out the first."""
    import torch.distributed as dist

    from megatron.parallel.messages import OutOfStepError
    from megatron.parallel.ranks import Ranks
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    send = getattr(Ranks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD), function)

    def send_first() -> None:
        send({"first": 1})

    def send_second() -> None:
        send(["second"])

    try:
        if dist.get_rank() != victim:
            send_first()
        send_second()
    except OutOfStepError as error:
        return error.places
    raise AssertionError("a wrong message was accepted")


def broadcast_values(values: list) -> tuple[list, list[str]]:
    import torch.distributed as dist

    from megatron.parallel.messages import broadcast_json
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    with unpickled() as found:
        group = dist.group.WORLD
        return [broadcast_json(v if dist.get_rank() == 0 else None, group) for v in values], found


def test_unpickling_by_torch_is_counted(pool: ProcessPool) -> None:
    assert [outcome.value for outcome in pool.run(2, gather_objects)] == [2, 2]


def test_values_of_any_length_arrive(pool: ProcessPool) -> None:
    values: list[Any] = [None, {"ä": [1, 2.5, True, None], "b": {"c": "x" * 100_000}}, [], "€"]
    for outcome in pool.run(4, gather_values, values):
        assert outcome.value == (values, []), outcome.output


def test_rank_0s_values_arrive_everywhere(pool: ProcessPool) -> None:
    values: list[Any] = [{"ä": [1, 2.5, True, None], "b": {"c": "x" * 100_000}}, [], "€", None, 0.1]
    for outcome in pool.run(3, broadcast_values, values):
        assert outcome.value == (values, []), outcome.output


@pytest.mark.parametrize(
    ("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError), (Path("/"), TypeError)]
)
def test_a_value_that_json_does_not_have_is_refused(value: object, error: type[Exception]) -> None:
    from megatron.parallel.messages import broadcast_json, gather_json

    with pytest.raises(error):
        gather_json(value, None)
    with pytest.raises(error):
        broadcast_json(value, None)
    assert gather_json((1, "a"), None) == [[1, "a"]]
    assert broadcast_json((1, "a"), None) == [1, "a"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(NATIVE, id="native pipeline"),
        pytest.param(
            "--tensor-model-parallel-size 2 --zero-stage 3",
            id="native zero",
            marks=pytest.mark.full,
        ),
        pytest.param(f"{NATIVE} --deepspeed", id="deepspeed pipeline", marks=pytest.mark.full),
        pytest.param(
            "--tensor-model-parallel-size 2 --zero-stage 2 --deepspeed",
            id="deepspeed zero",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_run_unpickles_nothing(
    layout: str, pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    """The run starts, checks invariants, saves, resumes, evaluates and finds two configurations."""
    run = Runner(pool, corpus, tmp_path / "run")
    flags = f"{SIZES} {layout}"
    first = run.argv(f"{flags} --exit-interval 3 --eval-interval 2 --eval-iters 1 --split 80,10,10")
    second = run.argv(f"{flags} --train-iters 5 --eval-iters 1 --split 80,10,10")
    for argv in (first, second):
        outcomes = pool.run(4, pretrain_and_count, argv)
        succeed(outcomes)
        assert [outcome.value for outcome in outcomes] == [([], "")] * 4
    assert (run.folder / "latest").read_text() == "global_step5"
    outcomes = pool.run(
        4, pretrain_and_count, PerRank([second, second, second, [*second, "--seed", "7"]])
    )
    for outcome in outcomes:
        found, error = outcome.value
        assert found == []
        assert "rank 3 on" in error
        assert "seed: 1234 and 7" in error


@pytest.mark.parametrize("function", ["gather", "gather_on_rank_0"])
@pytest.mark.parametrize("victim", [0, 2])
def test_rank_that_leaves_out_a_message_is_found(
    victim: int, function: str, pool: ProcessPool
) -> None:
    outcomes = pool.run(3, leave_out_a_message, victim, function)
    succeed(outcomes)
    names = ["rank 0 on a", "rank 1 on b", "rank 2 on c"]
    for outcome in outcomes:
        first, second = describe_places(outcome.value, names)
        assert re.fullmatch(rf"{names[victim]} is at \S+test_messages.py:\d+ send_second", first)
        assert re.fullmatch(r"2 of the other ranks are at \S+:\d+ send_first", second)


def gather_on_rank_0(values: list) -> list | None:
    import torch.distributed as dist

    from megatron.parallel.messages import gather_json_on_rank_0
    from megatron.parallel.rendezvous import start_process_group

    start_process_group("gloo", 1)
    # A rank that ends closes its connections, also to those that have not seen them open yet.
    dist.barrier()
    return gather_json_on_rank_0(values[dist.get_rank()], dist.group.WORLD)


def test_only_rank_0_gets_the_values(pool: ProcessPool) -> None:
    values = [None, {"text": "é " * 500 + " "}, [1, 2.5]]
    first, *others = pool.run(3, gather_on_rank_0, values)
    assert first.value == values
    assert [(outcome.value, outcome.error) for outcome in others] == [(None, None)] * 2


def test_without_a_group_the_value_is_converted() -> None:
    from megatron.parallel.messages import gather_json_on_rank_0

    assert gather_json_on_rank_0((1, "a"), None) == [[1, "a"]]
    with pytest.raises(TypeError):
        gather_json_on_rank_0(Path(), None)


def pretrain_and_count_slices(argv: list[str]) -> tuple[list[int], list[str], list[str]]:
    """Train and save. Return what this rank knows of all files when they are read back."""
    from unittest import mock

    from megatron.checkpoint.stages import SaveInProgress, SaveStages

    known: list[tuple[int, str, str]] = []
    read_back = SaveStages._read_back

    def record(self: SaveStages, save: SaveInProgress) -> None:
        known.extend((len(f.slices), f.digest.blocks, f.digest.xxh128) for f in save.files)
        read_back(self, save)

    with mock.patch.object(SaveStages, "_read_back", record):
        pretrain(argv)
    slices, blocks, digests = zip(*known, strict=True)
    return list(slices), list(blocks), list(digests)


def test_only_rank_0_knows_the_slices_and_blocks_of_all_files(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    run = Runner(pool, corpus, tmp_path)
    argv = run.argv("--train-iters 1 --keep-latest-checkpoints 1")
    outcomes = run.pool.run(2, pretrain_and_count_slices, argv)
    succeed(outcomes)
    first, second = (outcome.value for outcome in outcomes)
    assert len(first[0]) == len(second[0]) == 2
    assert all(first[0])
    assert all(first[1])
    assert set(second[0]) == {0}
    assert set(second[1]) == {""}
    # Every rank can still verify every file.
    assert first[2] == second[2]
