"""Data and tokenizer files that differ are refused before training or before the next save.

They may differ between ranks, or from those that the checkpoint recorded.
"""

import dataclasses
import json
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from checkpoint_damage import flip
from data.row_files import make_documents, write_rows
from process_pool import Outcome, PerRank, pretrain
from tiny_corpus import MERGES, VOCAB
from training.runs import Runner

from megatron.base.errors import DataError
from megatron.checkpoint.folder import step_folder
from megatron.checkpoint.manifest import MANIFEST, read_manifest
from megatron.config.data import DataConfig
from megatron.data import cache, content
from megatron.data.indexed import IndexedDataset, IndexedDatasetWriter
from megatron.data.registry import DatasetRegistry
from megatron.extras.samples.stream.build import list_streamed_datasets
from megatron.parallel.ranks import Ranks
from megatron.run.start.data_files import DataFiles
from megatron.run.state import TrainState

TOKENIZER = f"--vocab-file {VOCAB} --merge-file {MERGES}"


def pretrain_on_host(argv: list[str], folder: str, small_bytes: int = content.SMALL_BYTES) -> None:
    """Train in another working folder.

    A relative path then means another file, as on another host.
    """
    before = os.getcwd()
    os.chdir(folder)
    content.SMALL_BYTES = small_bytes
    try:
        pretrain(argv)
    finally:
        content.SMALL_BYTES = 1 << 30
        os.chdir(before)


def unsampled(size: int) -> list[int]:
    """Return the even positions of a file that the sampled fingerprint does not read."""
    starts = [(size - 4096) * number // 63 for number in range(64)]
    sampled = {start + i for start in starts for i in range(4096)}
    free = [at for at in range(0, size - 1, 2) if at not in sampled and at + 1 not in sampled]
    assert free, "the samples cover the complete file"
    return free


def alter_between_samples(path: Path) -> None:
    """Change every token that the sampled fingerprint does not read, and restore the mtime."""
    before = path.stat()
    raw = bytearray(path.read_bytes())
    for at in unsampled(len(raw)):
        raw[at] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def alter_sizes(path: Path) -> None:
    """Move one token from the second document of an .idx to the first."""
    raw = path.read_bytes()
    count = int.from_bytes(raw[18:26], "little")
    sizes = np.frombuffer(raw, "<i4", count, 34).copy()
    pointers = np.frombuffer(raw, "<i8", count, 34 + 4 * count).copy()
    sizes[0] += 1
    sizes[1] -= 1
    pointers[1] += 2
    path.write_bytes(raw[:34] + sizes.tobytes() + pointers.tobytes() + raw[34 + 12 * count :])


def alter_first_token(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[0] ^= 1
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def wide(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus that is larger than the samples of its fingerprint."""
    folder = tmp_path_factory.mktemp("wide")
    source = IndexedDataset(corpus)
    with IndexedDatasetWriter(folder / "data", np.uint16) as writer:
        for _ in range(4):
            writer.add_dataset(source)
    return folder


@pytest.fixture
def hosts(wide: Path, tmp_path: Path) -> list[Path]:
    """Two folders with copies of the data and of a split file, as on two hosts."""
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        shutil.copytree(wide, folder)
        (folder / "split.txt").write_text("train: 1.0 0:0.95 data")
    return folders


class OnHosts:
    """Launch a run with each rank in the folder of its host."""

    def __init__(self, run: Runner, hosts: list[Path]) -> None:
        self.run = run
        self.hosts = hosts

    def __call__(
        self, flags: str = "", ranks: int = 1, small_bytes: int = content.SMALL_BYTES
    ) -> list[Outcome]:
        argv = self.run.argv(flags)
        argv[argv.index("--data-path") + 1] = "data"
        if "--train-weighted-split-paths-path" in argv:
            del argv[argv.index("--data-path") : argv.index("--data-path") + 2]
        folders = PerRank([str(folder) for folder in self.hosts[:ranks]])
        return self.run.pool.run(ranks, pretrain_on_host, argv, folders, small_bytes)

    def succeed(self, flags: str = "", ranks: int = 1, **how: int) -> str:
        outcomes = self(flags, ranks, **how)
        assert [outcome.error for outcome in outcomes] == [None] * ranks, outcomes[0].output
        return outcomes[0].output

    def errors(self, flags: str = "", ranks: int = 1, **how: int) -> list[str]:
        return [f"{outcome.kind}: {outcome.error}" for outcome in self(flags, ranks, **how)]

    def state(self, iteration: int) -> dict:
        return read_manifest(step_folder(self.run.folder, iteration)).state

    def trained(self) -> list[int]:
        return self.run.losses_of_training() if (self.run.folder / "metrics.jsonl").exists() else []


@pytest.fixture
def on_hosts(run: Runner, hosts: list[Path]) -> OnHosts:
    return OnHosts(run, hosts)


def test_equal_copies_train_and_their_digest_is_recorded(on_hosts: OnHosts) -> None:
    on_hosts.succeed("--train-iters 2 --save-interval 2", ranks=2)
    digests = on_hosts.state(2)["data_digests"]
    assert list(digests.values()) == [content.digest_of_file(on_hosts.hosts[0] / "data.bin")]


@pytest.mark.parametrize(
    ("file", "alter", "kind"),
    [
        ("data.bin", alter_first_token, "LayoutError"),
        ("data.idx", alter_sizes, "LayoutError"),
        ("data.bin", alter_between_samples, "DataError"),
        ("data.bin", lambda path: path.unlink(), "DataError"),
    ],
    ids=["sampled", "index", "between the samples", "missing"],
)
def test_host_with_different_data_is_named_before_the_first_step(
    on_hosts: OnHosts, file: str, alter, kind: str
) -> None:
    alter(on_hosts.hosts[1] / file)
    rank_0, rank_1 = on_hosts.errors("--train-iters 2", ranks=2)
    assert rank_0.startswith(f"{kind}: rank 1 on {os.uname().nodename}")
    assert "data" in rank_0
    assert rank_1.startswith(f"{kind}: ")
    assert on_hosts.trained() == []


def test_large_file_that_differs_ends_the_run_before_its_save(on_hosts: OnHosts) -> None:
    """A file above the limit for small files is compared before the save.

    Its digest is computed in the background.
    """
    alter_between_samples(on_hosts.hosts[1] / "data.bin")
    (error, _) = on_hosts.errors("--train-iters 400 --save-interval 200", ranks=2, small_bytes=0)
    assert error.startswith("DataError: rank 1 on ")
    assert "xxh3_128" in error
    assert not step_folder(on_hosts.run.folder, 200).exists()


def test_host_with_a_different_split_file_is_named(on_hosts: OnHosts) -> None:
    (on_hosts.hosts[1] / "split.txt").write_text("train: 1.0 0:0.5 data")
    for error in on_hosts.errors(
        "--train-iters 2 --train-weighted-split-paths-path split.txt", ranks=2
    ):
        assert error.startswith("LayoutError: rank 1 on ")
        assert "split file split.txt" in error


def test_host_with_a_different_tokenizer_is_named(on_hosts: OnHosts) -> None:
    for folder, extra in zip(on_hosts.hosts, ("", "\n"), strict=True):
        shutil.copyfile(VOCAB, folder / "vocab.json")
        (folder / "merges.txt").write_text(Path(MERGES).read_text() + extra)
    for error in on_hosts.errors(
        "--train-iters 2 --vocab-file vocab.json --merge-file merges.txt", ranks=2
    ):
        assert error.startswith("LayoutError: rank 1 on ")
        assert "--merge-file merges.txt" in error


@pytest.mark.parametrize("small_bytes", [content.SMALL_BYTES, 0], ids=["small", "large"])
def test_corpus_altered_between_the_samples_is_refused_on_resume(
    on_hosts: OnHosts, small_bytes: int
) -> None:
    on_hosts.succeed("--exit-interval 2")
    recorded = on_hosts.state(2)["data_digests"]
    before = IndexedDataset(on_hosts.hosts[0] / "data").compute_fingerprint()
    alter_between_samples(on_hosts.hosts[0] / "data.bin")
    assert IndexedDataset(on_hosts.hosts[0] / "data").compute_fingerprint() == before, (
        "the alteration must not change the sampled fingerprint"
    )
    (error,) = on_hosts.errors("--train-iters 400 --save-interval 200", small_bytes=small_bytes)
    assert "data.bin has changed" in error
    assert recorded[before] in error
    assert "--finetune" in error
    assert on_hosts.trained() == [1, 2] or small_bytes == 0
    assert not step_folder(on_hosts.run.folder, 200).exists()
    assert "successfully saved" in on_hosts.succeed(
        f"--finetune --save {on_hosts.run.folder}-new --train-iters 2"
    )


def test_moved_corpus_is_accepted_on_resume(on_hosts: OnHosts, tmp_path: Path) -> None:
    on_hosts.succeed("--exit-interval 2")
    on_hosts.hosts[0] = shutil.copytree(on_hosts.hosts[0], tmp_path / "elsewhere")
    assert "warning: the checkpoint has no digest" not in on_hosts.succeed("--train-iters 3")
    assert on_hosts.trained() == [1, 2, 3]


def test_digest_is_none_until_it_is_computed(
    on_hosts: OnHosts,
) -> None:
    held = threading.Event()
    library = DatasetRegistry(str(on_hosts.run.folder / "cache"))
    prefix = str(on_hosts.hosts[0] / "data")
    fingerprint = library.open(prefix).compute_fingerprint()

    def wait_until_released() -> str | None:
        return None if held.wait(30) else "not released in 30 s"

    library.background.submit("a check that takes long", wait_until_released)
    content.SMALL_BYTES = 0
    try:
        files = DataFiles(library, TrainState(), ranks=Ranks(), who="rank 0", log=lambda line: None)
        files.check()
        assert files.record() == {fingerprint: None}
        held.set()
        assert library.background.wait(30)
        files.check()
        assert files.record() == {fingerprint: content.digest_of_file(Path(f"{prefix}.bin"))}
    finally:
        content.SMALL_BYTES = 1 << 30
        library.background.close()


def strip_digests(folder: Path) -> None:
    """Remove the digests from a checkpoint, as an older version wrote it."""
    manifest = read_manifest(folder)
    state = {
        name: value
        for name, value in manifest.state.items()
        if name not in ("data_digests", "tokenizer")
    }
    (folder / MANIFEST).write_text(dataclasses.replace(manifest, state=state).dump_json())


def test_older_checkpoint_resumes_and_reports_what_is_not_compared(on_hosts: OnHosts) -> None:
    on_hosts.succeed(f"--exit-interval 2 {TOKENIZER}")
    strip_digests(step_folder(on_hosts.run.folder, 2))
    output = on_hosts.succeed(f"--train-iters 4 --save-interval 4 {TOKENIZER}")
    assert "the checkpoint has no digest of all bytes of data" in output
    assert "the checkpoint has no digests of the tokenizer's files" in output
    assert len(on_hosts.state(4)["data_digests"]) == 1
    assert sorted(on_hosts.state(4)["tokenizer"]) == ["--merge-file", "--vocab-file"]
    output = on_hosts.succeed(f"--train-iters 5 {TOKENIZER}")
    assert "no digest" not in output


def test_different_tokenizer_of_the_same_size_is_refused_on_resume(
    run: Runner, tmp_path: Path
) -> None:
    run(f"--exit-interval 2 {TOKENIZER}")
    vocabulary = json.loads(Path(VOCAB).read_text())
    names = list(vocabulary)
    swapped = vocabulary | {names[300]: vocabulary[names[301]], names[301]: vocabulary[names[300]]}
    other = tmp_path / "tokB"
    other.mkdir()
    (other / "vocab.json").write_text(json.dumps(swapped))
    shutil.copyfile(MERGES, other / "merges.txt")
    flags = f"--vocab-file {other}/vocab.json --merge-file {other}/merges.txt"
    error = run.error(f"--train-iters 4 {flags}")
    assert error.startswith("ConfigError: ")
    assert f"--vocab-file {other}/vocab.json is " in error
    assert "--merge-file" not in error
    assert "--finetune" in error
    assert run.losses_of_training() == [1, 2]
    shutil.copyfile(VOCAB, other / "vocab.json")  # moved, but identical
    run(f"--exit-interval 3 {flags}")
    assert "it was not compared with the checkpoint's" in run("--train-iters 4")
    (other / "vocab.json").write_text(json.dumps(swapped))
    run(f"--finetune --train-iters 2 --save {tmp_path}/new {flags}")


def pretrain_with_large_indices(argv: list[str]) -> None:
    """Treat each cached array as large. The check at the start then reads only 64 bytes of it."""
    complete = cache.WHOLE_BYTES
    sample = cache.SAMPLE_BYTES
    cache.WHOLE_BYTES = 0
    cache.SAMPLE_BYTES = 1
    try:
        pretrain(argv)
    finally:
        cache.WHOLE_BYTES = complete
        cache.SAMPLE_BYTES = sample


def test_damaged_large_index_ends_the_run_before_its_save_and_is_rebuilt(
    run: Runner, other: Runner
) -> None:
    def launch(flags: str, ranks: int = 2) -> list[Outcome]:
        return run.pool.run(ranks, pretrain_with_large_indices, run.argv(flags))

    other("--train-iters 22", ranks=2)
    assert [outcome.error for outcome in launch("--exit-interval 2 --train-iters 22")] == [
        None,
        None,
    ]
    (file,) = (run.folder / "cache").glob("samples-*-shuffle_idx.npy")
    raw = bytearray(file.read_bytes())
    raw[128 + 4 * 9] ^= 1  # another sample, which exists
    file.write_bytes(raw)
    for outcome in launch("--train-iters 22 --save-interval 20"):
        assert outcome.kind == "DataError"
        assert outcome.error is not None
        # Each rank checks in the background. Either may be the first to find the damage.
        assert re.search(rf"rank [01] on {os.uname().nodename}", outcome.error)
        assert f"{file} is damaged" in outcome.error
    assert not step_folder(run.folder, 20).exists()
    assert [outcome.error for outcome in launch("--train-iters 22 --save-interval 20")] == [
        None,
        None,
    ]
    assert run.losses() == other.losses()


def test_streamed_file_altered_between_the_samples(tmp_path: Path) -> None:
    """Its digest is computed in the background, and compared before the next save."""
    file = tmp_path / "data" / "a.parquet"
    write_rows(file, "tokens", make_documents(5000, 0))
    config = DataConfig(data_path=(str(file.parent),), dataset_format="parquet", col_name="tokens")

    def check(recorded: dict[str, str | None], *, allow: bool = False) -> dict[str, str | None]:
        registry = DatasetRegistry(None)
        listing = list_streamed_datasets(config, ["."])["."]
        file_set = listing.get_file_set()
        assert file_set is not None
        registry.file_sets.append(file_set)
        state = TrainState(data={"train": {}}, data_digests=recorded)
        files = DataFiles(
            registry, state, Ranks(), "rank 0", messages.append, allow_changed_data=allow
        )
        try:
            assert registry.background.wait(30)
            files.check()
        finally:
            registry.background.close()
        return files.record()

    messages: list[str] = []
    recorded = check({})
    ((fingerprint, digest),) = recorded.items()
    assert digest is not None
    assert check(recorded) == recorded
    times = file.stat()
    flip(file, position=file.stat().st_size // 3)
    # Only the time of the last change of the inode shows this.
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"has changed: its xxh3_128 is .* --allow-changed-data"):
        check(recorded)
    changed = check(recorded, allow=True)
    assert changed.keys() == {fingerprint}
    assert changed[fingerprint] not in (None, digest)
    assert "--allow-changed-data accepts it" in messages[-1]
