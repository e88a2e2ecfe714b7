"""The plan of a fresh run is resolved once, before torch, and rank 0 takes it over."""

import pytest
from tiny_corpus import MERGES, VOCAB
from training.runs import SIZES

from megatron.base.errors import ConfigError
from megatron.config.cli import load_config
from megatron.run.start import job
from megatron.run.start.launch import Launch, check_before_torch, read_launch

FLAGS = f"{SIZES} --mock-data --vocab-file {VOCAB} --merge-file {MERGES}"


def launch(rank: int, flags: str, monkeypatch: pytest.MonkeyPatch, size: int = 2) -> Launch:
    """Return the launch of a rank after the checks that need no torch."""
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank}.items():
        monkeypatch.setenv(name, str(value))
    return check_before_torch(read_launch(load_config(flags.split())))


def test_rank_0_alone_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch(0, FLAGS, monkeypatch)
    assert launch(1, FLAGS, monkeypatch).early is None
    assert found.early is not None
    # A rank that reads no file has a placeholder here.
    assert found.early.vocab_size > 1
    again = job.resolve(found.config, 2, found.loaded.origin, ranks_per_node=2)
    assert found.early == again


def test_job_of_a_fresh_run_has_the_early_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launch(0, FLAGS, monkeypatch)

    def fail(*arguments: object, **options: object) -> None:
        raise AssertionError("the plan is resolved a second time")

    monkeypatch.setattr(job, "resolve", fail)
    assert job.resolve_job(found, None).plan is found.early


def test_a_file_that_only_rank_0_reads_is_reported_after_the_ranks_have_met(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = f"{SIZES} --mock-data --vocab-file /nowhere/v.json --merge-file {MERGES}"
    found = launch(0, flags, monkeypatch)
    assert found.early is None
    with pytest.raises(ConfigError, match=r"/nowhere/v\.json does not exist"):
        job.resolve_job(found, None)
    with pytest.raises(ConfigError, match=r"/nowhere/v\.json does not exist"):
        launch(0, flags, monkeypatch, size=1)


def test_a_mistake_that_all_ranks_find_is_refused_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{FLAGS} --tensor-model-parallel-size 3"
    for rank in (0, 1):
        with pytest.raises(ConfigError, match="must divide the number of processes, 2"):
            launch(rank, flags, monkeypatch)
