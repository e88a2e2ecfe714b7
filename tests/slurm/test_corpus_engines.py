"""Each engine gives the same bytes, whatever is killed or lost. Slurm is a real one.

With CORPUS_MB=1000 it measures as in docs/benchmarks_data.md. `pytest -s` shows the numbers.
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from preprocess.changed_texts import write_changed_texts
from preprocess.corpus_runs import Made, make_corpus, make_environment, when_stopped
from slurm.cluster import Cluster

from megatron.extras.preparation.commands import merge_datasets
from megatron.extras.preparation.corpus.manifest import compute_sha256

MEGABYTES = int(os.environ.get("CORPUS_MB", "10"))
FILES = 10


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Uneven files."""
    each = MEGABYTES * 1_000_000 // (FILES + 1)
    folder = tmp_path_factory.mktemp("texts")
    return write_changed_texts(folder, [2 * each, *([each] * (FILES - 1))])


@pytest.fixture(scope="module")
def expected(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make("local with 1 worker", tmp_path_factory.mktemp("local"), inputs, "local", 1)


def make(
    name: str,
    folder: Path,
    inputs: list[Path],
    engine: str | None,
    workers: int,
    *flags: str,
    environment: dict[str, str] | None = None,
) -> Made:
    """Make a corpus and print its speed."""
    chosen = [] if engine is None else ["--engine", engine]
    made = make_corpus(
        folder / "corpus",
        *("--input", *map(str, inputs), *chosen, "--workers", str(workers), *flags),
        environment=environment,
    )
    assert made.code == 0, made.output
    logs = [path.read_text() for path in (folder / "corpus" / "tasks").glob("*.log")]
    found = re.findall(r"ended after ([0-9.]+) s of CPU", "\n".join([made.output, *logs]))
    cpu = sum(map(float, found))
    megabytes = sum(path.stat().st_size for path in inputs) / 1e6
    print(
        f"\n{name}: {megabytes:.0f} MB in {made.seconds:.1f} s, {megabytes / made.seconds:.1f} "
        f"MB/s, {cpu:.1f} s of CPU in {len(found)} tasks, at most {made.peak / 1e6:.0f} MB of "
        "memory in a process"
    )
    return made


@pytest.mark.full
def test_memory_does_not_grow_with_the_file(expected: Made, tmp_path: Path) -> None:
    """The largest file has ten times as many bytes as the other corpus."""
    small = write_changed_texts(tmp_path / "small", [MEGABYTES * 100_000])
    made = make("local, a tenth of the text", tmp_path, small, "local", 1)
    print(f"grows by {(expected.peak - made.peak) / 1e6:.0f} MB")
    assert expected.peak < made.peak + 100_000_000


@pytest.mark.full
@pytest.mark.parametrize("workers", [1, 2])
def test_merged_shards_are_the_output_without_an_engine(
    workers: int, expected: Made, inputs: list[Path], tmp_path: Path
) -> None:
    make(f"without an engine, workers: {workers}", tmp_path, inputs, None, workers)
    merged = str(tmp_path / "merged")
    assert merge_datasets.main(["--input", str(expected.manifest), "--output-prefix", merged]) == 0
    for suffix in ("bin", "idx"):
        digest = compute_sha256(tmp_path / f"corpus_text_document.{suffix}")
        assert digest == compute_sha256(Path(f"{merged}.{suffix}"))


@pytest.mark.full
def test_two_workers(expected: Made, inputs: list[Path], tmp_path: Path) -> None:
    assert make("local with 2 workers", tmp_path, inputs, "local", 2).digests == expected.digests


@pytest.mark.full
def test_slurm_with_killed_tasks_and_a_lost_node(
    cluster: Cluster, expected: Made, inputs: list[Path], tmp_path: Path
) -> None:
    """One task is killed twice, and the node of another one is lost."""
    slurm = {
        "SLURM_CONF": str(cluster.folder / "slurm.conf"),
        "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
    }
    # Each task has a node of its own.
    flags = ("--slurm-args=--exclusive --time=30",)
    made = make(
        *("Slurm with 3 tasks", tmp_path / "a", inputs, "slurm", 3, *flags),
        environment=make_environment(None) | slurm,
    )
    assert made.digests == expected.digests
    faults = tmp_path / "faults"
    faults.mkdir()
    for fault in ("part-000 kill 1", "part-000 kill 2", "part-001 stop 1"):
        (faults / fault).touch()
    lost = []

    def lose(node: str) -> None:
        lost.append(node)
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=lost")

    thread = when_stopped(faults / "part-001 stopped", lose)
    made = make(
        *("Slurm with faults", tmp_path / "b", inputs, "slurm", 3, *flags),
        environment=make_environment(faults) | slurm,
    )
    thread.join()
    print(made.output)
    assert len(lost) == 1
    assert [path.name for path in faults.iterdir()] == ["part-001 stopped"]
    assert "1 file without a shard" in made.output or "attempt 2 of 3" in made.output
    assert made.digests == expected.digests


@pytest.mark.full
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="RAY IS NOT INSTALLED: ITS ENGINE IS NOT TESTED: pip install 'megatron-3d[ray]'",
)
def test_ray_with_a_killed_worker(expected: Made, inputs: list[Path], tmp_path: Path) -> None:
    made = make("Ray with 2 tasks", tmp_path / "a", inputs, "ray", 2)
    assert made.digests == expected.digests
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "part-000 kill 1").touch()
    environment = make_environment(faults)
    made = make("Ray with a fault", tmp_path / "b", inputs, "ray", 2, environment=environment)
    print(made.output)
    assert not list(faults.iterdir())
    assert made.digests == expected.digests
