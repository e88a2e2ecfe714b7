"""Messages between ranks are JSON: what arrives over the network is never unpickled."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_pool import PerRank, ProcessPool, pretrain, succeed
from training.runs import Runner

SIZES = "--num-layers 2 --check-invariants-interval 1 --save-interval 2 --keep-latest-checkpoints 1"
NATIVE = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"


@contextlib.contextmanager
def unpickled() -> Iterator[list[str]]:
    """Collect where anything is unpickled in this process, by Python or by torch.distributed."""
    import torch.distributed.distributed_c10d as c10d

    found: list[str] = []

    def noted(original):
        def call(*args, **kwargs):
            found.append("".join(traceback.format_stack(limit=6)))
            return original(*args, **kwargs)

        return call

    places = [(pickle, "loads"), (pickle, "load"), (pickle, "Unpickler"), (c10d, "_unpickler")]
    originals = [getattr(module, name) for module, name in places]
    for (module, name), original in zip(places, originals, strict=True):
        setattr(module, name, noted(original))
    try:
        yield found
    finally:
        for (module, name), original in zip(places, originals, strict=True):
            setattr(module, name, original)


def pretrain_and_count(argv: list[str]) -> tuple[list[str], str]:
    """What a run unpickled, and how it ended."""
    from megatron.errors import LayoutError

    with unpickled() as found:
        try:
            pretrain(argv)
        except LayoutError as error:
            return found, str(error)
    return found, ""


def gather_objects() -> int:
    import torch.distributed as dist

    from megatron.parallel.mesh import start_process_group

    start_process_group("gloo", 1)
    with unpickled() as found:
        dist.all_gather_object([None, None], {"a": 1})
    return len(found)


def gather_values(values: list) -> tuple[list, list[str]]:
    import torch.distributed as dist

    from megatron.parallel.mesh import start_process_group
    from megatron.parallel.messages import gather_json

    start_process_group("gloo", 1)
    with unpickled() as found:
        return gather_json(values[dist.get_rank()], dist.group.WORLD), found


def test_the_count_sees_what_torch_unpickles(pool: ProcessPool) -> None:
    assert [outcome.value for outcome in pool.run(2, gather_objects)] == [2, 2]


def test_values_of_any_length_arrive(pool: ProcessPool) -> None:
    values = [None, {"ä": [1, 2.5, True, None], "b": {"c": "x" * 100_000}}, [], "€"]
    for outcome in pool.run(4, gather_values, values):
        assert outcome.value == (values, []), outcome.output


@pytest.mark.parametrize(
    ("value", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError), (Path("/"), TypeError)]
)
def test_what_json_does_not_have_is_refused(value: object, error: type[Exception]) -> None:
    from megatron.parallel.messages import gather_json

    with pytest.raises(error):
        gather_json(value, None)
    assert gather_json((1, "a"), None) == [[1, "a"]]


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
    """Start, invariants, save, resume, evaluation, and the disagreement of two configurations."""
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
