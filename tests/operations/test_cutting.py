"""Cutting removes the later iterations of each kind of record, and loses no byte."""

import os
import struct
import tempfile
from pathlib import Path

import pytest
from operations.run_folder import FakeRun, charts, report
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from megatron.base.errors import OperationsError
from megatron.config.logging import LoggingConfig
from megatron.extras.operations.rollback.cutting import (
    CutSpans,
    cut_out,
    find_events_cut,
    find_last_iteration,
    find_log_cut,
    find_metrics_cut,
)
from megatron.observe.log_line import format_training_line
from megatron.observe.metrics import read_metrics
from megatron.observe.report import EvaluationReport
from megatron.observe.tensorboard import TensorBoard

TEMPORARY = ".cutting"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    """Make the empty folder of a run."""
    return FakeRun(tmp_path / "run", tmp_path / "aside")


def records(data: bytes) -> list[bytes]:
    """Split an event file into its records, with TensorBoard's own function for the CRC.

    Fail the test if a CRC is wrong, or if the file ends within a record.
    """
    found = []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12])[0] == masked_crc32c(data[:8])
        payload = data[12 : 12 + length]
        assert struct.unpack("<I", data[12 + length : 16 + length])[0] == masked_crc32c(payload)
        assert len(payload) == length
        found.append(data[: 16 + length])
        data = data[16 + length :]
    return found


def event_file(folder: Path, first: int, last: int, *, ramp_up: bool = True) -> Path:
    """Write the event file of one launch, with a validation every 4 iterations."""
    board = TensorBoard(LoggingConfig(tensorboard_dir=str(folder)))
    for iteration in range(first, last + 1):
        if ramp_up:
            found = report(iteration)
        else:
            found = report(iteration, samples=40 * iteration)
        board.write(found)
        if iteration % 4 == 0:
            board.write(EvaluationReport(at=found.axes, loss=5.0))
    board.close()
    (path,) = [path for path in folder.iterdir() if ".done" not in path.name]
    return path.rename(path.with_name(f"{path.name}.done{len(list(folder.iterdir()))}"))


def cut_events(path: Path, part: Path, iteration: int = 8) -> CutSpans:
    """Cut the records of later iterations out of an event file."""
    cut = find_events_cut(path, report(iteration).axes)
    cut_out(path, part, cut, TEMPORARY)
    return cut


@pytest.mark.parametrize(
    "ramp_up", [True, False], ids=["the checkpoint's counters", "another batch size"]
)
def test_events_are_cut_on_every_axis_by_their_own_iteration(tmp_path: Path, ramp_up: bool) -> None:
    """Each chart keeps the points up to the iteration, whatever its step axis is."""
    path = event_file(tmp_path / "tb", 1, 12, ramp_up=ramp_up)
    part = tmp_path / "parts" / "tb" / "tfevents.part"
    before = records(path.read_bytes())
    points = charts(tmp_path / "tb")
    cut = cut_events(path, part)
    kept = records(path.read_bytes())
    gone = records(part.read_bytes())
    # The first record is the version. Both parts need it.
    assert kept[0] == before[0]
    assert gone[0] == before[0]
    assert kept + gone[1:] == before
    assert cut.count == len(gone) - 1
    assert cut.total == len(before) - 1
    for tag, all_points in points.items():
        validation = "validation" in tag
        # A validation at iteration 8 belongs to iteration 8.
        stay = 2 if validation else 8
        assert charts(tmp_path / "tb")[tag] == all_points[:stay], tag
        assert charts(part.parent)[tag] == all_points[stay:], tag
        assert len(all_points) == (3 if validation else 12)
    assert len(points) == 18
    assert not (tmp_path / "tb" / TEMPORARY).exists()


def test_the_checkpoints_counter_decides_if_the_iteration_is_unknown(tmp_path: Path) -> None:
    """Without the record that has the iteration, the step is compared with the counter."""
    path = event_file(tmp_path / "tb", 7, 10)

    def keeps(record: bytes) -> bool:
        event = Event.FromString(record[12:-4])
        return (
            not event.summary.value
            or event.summary.value[0].tag == "grad-norm/grad-norm vs samples"
        )

    path.write_bytes(b"".join(record for record in records(path.read_bytes()) if keeps(record)))
    cut_events(path, tmp_path / "part")
    steps = [step for step, _ in charts(tmp_path / "tb")["grad-norm/grad-norm vs samples"]]
    # The samples of iterations 7 and 8.
    assert steps == [32, 40]


def pack_record(event: Event) -> bytes:
    """Return a record of an event file, with the CRCs of TensorBoard's own function."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    header = length + struct.pack("<I", masked_crc32c(length))
    return header + data + struct.pack("<I", masked_crc32c(data))


def make_event(step: int, *tags: str) -> Event:
    """Return an event with one value for each tag."""
    event = Event(step=step)
    for tag in tags:
        event.summary.value.add(tag=tag, simple_value=1.0)
    return event


def test_every_value_of_a_record_counts_for_the_next_records(tmp_path: Path) -> None:
    """A record may have several values, and each gives the iteration of its tag's other axes.

    Here `b` is at iteration 9 in a record that is later because of `a` already. The step of
    `b vs samples` alone would not show that it is later.
    """
    path = tmp_path / "events.out.tfevents.1"
    kept = [pack_record(Event(file_version="brain.Event:2")), pack_record(make_event(8, "b"))]
    gone = [pack_record(make_event(9, "a", "b")), pack_record(make_event(1, "b vs samples"))]
    path.write_bytes(b"".join([*kept, *gone]))
    cut_events(path, tmp_path / "part")
    assert records(path.read_bytes()) == kept
    assert records((tmp_path / "part").read_bytes())[1:] == gone


def test_a_file_of_later_iterations_only_is_removed(tmp_path: Path) -> None:
    """The complete file is moved to the part."""
    path = event_file(tmp_path / "tb", 9, 12)
    part = tmp_path / "parts" / "events.tfevents"
    before = path.read_bytes()
    assert cut_events(path, part).removes_file
    assert not path.exists()
    assert part.read_bytes() == before


def test_a_file_of_earlier_iterations_is_not_changed(tmp_path: Path) -> None:
    """The file stays as it is, including damage at its end."""
    path = event_file(tmp_path / "tb", 1, 8)
    with path.open("ab") as file:
        file.write(b"torn")
    before = path.read_bytes()
    inode = path.stat().st_ino
    assert cut_events(path, tmp_path / "part").gone == ()
    assert path.read_bytes() == before
    assert path.stat().st_ino == inode
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("lost", [1, 3, 4, 5, 11, 12, 13, 20, 40])
def test_an_incomplete_last_record_loses_no_other_record(tmp_path: Path, lost: int) -> None:
    """The bytes of the incomplete record are kept in a file of their own."""
    path = event_file(tmp_path / "tb", 1, 12)
    part = tmp_path / "part"
    before = records(path.read_bytes())
    torn = before[-1][: len(before[-1]) - lost]
    path.write_bytes(b"".join(before[:-1]) + torn)
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == before[:-1]
    assert (tmp_path / "part.unreadable").read_bytes() == torn


@pytest.mark.parametrize(
    "tail",
    [bytes(4096), b"\xff" * 100, struct.pack("<Q", 3) + b"no CRC of it"],
    ids=["0", "ff", "crc"],
)
def test_garbage_at_the_end_loses_no_record(tmp_path: Path, tail: bytes) -> None:
    """The garbage is kept in a file of its own."""
    path = event_file(tmp_path / "tb", 1, 12)
    part = tmp_path / "part"
    before = records(path.read_bytes())
    path.write_bytes(b"".join(before) + tail)
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == before
    assert (tmp_path / "part.unreadable").read_bytes() == tail


def test_a_damaged_record_is_skipped(tmp_path: Path) -> None:
    """The damaged record is kept in a file of its own, and all others are cut or kept."""
    path = event_file(tmp_path / "tb", 1, 12)
    part = tmp_path / "part"
    before = records(path.read_bytes())
    damaged = bytearray(before[30])
    damaged[14] ^= 1
    path.write_bytes(b"".join([*before[:30], bytes(damaged), *before[31:]]))
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == before[:30] + before[31:]
    assert (tmp_path / "part.unreadable").read_bytes() == bytes(damaged)


def test_an_empty_event_file_has_nothing_to_cut(tmp_path: Path) -> None:
    """A file without a single byte is not an error."""
    path = tmp_path / "events.out.tfevents.1"
    path.touch()
    assert find_events_cut(path, report(8).axes).gone == ()


# Metrics


def cut_metrics(run: FakeRun, part: Path, iteration: int = 8) -> None:
    """Cut the lines of later iterations out of the run's metrics."""
    cut_out(run.metrics, part, find_metrics_cut(run.metrics, iteration), TEMPORARY)


def curve(path: Path) -> dict[int, float]:
    """Return the losses of a metrics file, iteration -> loss."""
    return {entry["iteration"]: entry["lm_loss"] for entry in read_metrics(path)}


def test_metrics_are_cut_by_iteration_and_both_parts_can_be_read(
    run: FakeRun, tmp_path: Path
) -> None:
    """Nothing is lost, and the metrics of both files are those of their own iterations."""
    # The last save is at iteration 8.
    run.launch(1, 11)
    run.launch(9, 12, scale=2)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    cut_metrics(run, tmp_path / "part")
    kept = run.metrics.read_bytes().splitlines(keepends=True)
    assert kept == lines[: len(kept)]
    assert [*kept, *(tmp_path / "part").read_bytes().splitlines(keepends=True)] == lines
    assert curve(run.metrics) == {i: 10 / i for i in range(1, 9)}
    assert read_metrics(run.metrics)[-1]["validation"] == {"validation": 1.25}
    assert curve(tmp_path / "part") == {i: 20 / i for i in range(9, 13)}


def test_iterations_that_were_left_by_hand_stay_left_out(run: FakeRun, tmp_path: Path) -> None:
    """After an earlier return to a checkpoint by hand, only the later launch's lines count."""
    run.launch(1, 12)
    run.back_to(4)
    run.launch(5, 9, scale=2)
    cut_metrics(run, tmp_path / "part")
    first = {i: 10 / i for i in range(1, 5)}
    second = {i: 20 / i for i in range(5, 9)}
    assert curve(run.metrics) == first | second


def test_unreadable_lines_are_treated_like_the_line_before(run: FakeRun, tmp_path: Path) -> None:
    """An incomplete line is kept or removed together with the line before it."""
    run.launch(1, 12)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    torn = lines[3][:20] + b"\n"
    path = run.metrics
    path.write_bytes(b"".join([*lines[:3], torn, *lines[4:], b'{"kind": "train", "itera']))
    cut_metrics(run, tmp_path / "part")
    assert torn in path.read_bytes()
    assert (tmp_path / "part").read_bytes().endswith(b'{"kind": "train", "itera')
    assert sorted(curve(path)) == [1, 2, *range(4, 9)]


def test_the_last_iteration_is_found_in_all_launches(run: FakeRun) -> None:
    run.launch(1, 12)
    run.back_to(4)
    run.launch(5, 8)
    with run.metrics.open("a") as file:
        file.write('{"kind": "start", "iteration": 20}\n{"kind": "train", "itera')
    assert find_last_iteration(run.metrics) == 12


# Log


def line(iteration: int) -> str:
    """Return the training line of an iteration, with the prefix of a launcher."""
    return f"[default7]:{format_training_line(report(iteration))}"


def saved(iteration: int) -> str:
    """Return the line after a save."""
    return f" successfully saved checkpoint at iteration {iteration:7d} to /run"


def validated(iteration: int) -> str:
    """Return the line of a validation."""
    values = "lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 |"
    return f" validation loss at iteration {iteration} | {values}"


LOADED = "successfully loaded checkpoint from /run at iteration 8"


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        (
            ["srun", line(7), line(8), validated(8), saved(8)],
            ["noise", line(9), line(12), validated(12), saved(12)],
        ),
        # The log interval skips iteration 8, so the line of its save decides.
        (["srun", line(5), saved(8)], ["noise", line(10), "exiting program at iteration 12"]),
        # With --async-save the line of the save is later.
        ([line(7), line(8)], [line(9), saved(8), line(10)]),
        # The first launch was killed after its save, and the second one resumed from there.
        ([line(8), saved(8)], [line(9), line(10), "srun", LOADED, line(9), line(12), saved(12)]),
        # The run went back by hand, so the last launch that passed iteration 8 counts.
        (
            [line(8), saved(8), line(12), saved(12), "srun", line(5), line(8), saved(8)],
            [line(9), saved(12)],
        ),
        # All lines are later.
        ([], ["srun", line(9), line(12)]),
        # No line is later.
        ([line(7), line(8), saved(8)], []),
    ],
)
@pytest.mark.parametrize("end", ["\n", ""], ids=["", "torn"])
def test_the_log_is_cut_after_the_last_line_of_the_iteration(
    tmp_path: Path, kept: list[str], gone: list[str], end: str
) -> None:
    """Everything after the last line of the iteration or an earlier one is removed."""
    path = tmp_path / "main_log.txt"
    part = tmp_path / "part"
    text = "\n".join([*kept, *gone]) + end
    path.write_text(text)
    cut = find_log_cut(path, 8)
    assert (cut.count, cut.total) == (len(gone), len(kept) + len(gone))
    cut_out(path, part, cut, TEMPORARY)
    removed = ""
    if gone:
        removed = "\n".join(gone) + end
        assert part.read_text() == removed
    else:
        assert not part.exists()
    assert path.read_text() == text.removesuffix(removed)


def test_a_log_without_iterations_is_refused(tmp_path: Path) -> None:
    """A file without training, validation or save lines is not the log of a run."""
    path = tmp_path / "main_log.txt"
    path.write_text("iteration is a word\n")
    with pytest.raises(OperationsError, match="no line of an iteration"):
        find_log_cut(path, 8)


# Cutting itself


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Write a metrics file of 12 iterations."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "train", "iteration": {i}}}\n' for i in range(1, 13)))
    return path


def test_an_interrupted_cut_can_be_repeated(lines: Path, tmp_path: Path) -> None:
    """If the part was written and the file did not change yet, the same part is used again."""
    before = lines.read_bytes()
    part = tmp_path / "part"
    cut_out(lines, part, find_metrics_cut(lines, 8), TEMPORARY)
    kept = lines.read_bytes()
    gone = part.read_bytes()
    lines.write_bytes(before)
    cut_out(lines, part, find_metrics_cut(lines, 8), TEMPORARY)
    assert lines.read_bytes() == kept
    assert part.read_bytes() == gone
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "part"]


def test_a_part_with_another_content_is_not_overwritten(lines: Path, tmp_path: Path) -> None:
    """The new part gets a number instead."""
    (tmp_path / "part").write_text("precious")
    cut_out(lines, tmp_path / "part", find_metrics_cut(lines, 8), TEMPORARY)
    assert (tmp_path / "part").read_text() == "precious"
    assert len((tmp_path / "part.2").read_text().splitlines()) == 4


def test_a_file_that_somebody_writes_to_is_not_cut(lines: Path, tmp_path: Path) -> None:
    """A write after the file was examined is noticed, and the file stays complete."""
    cut = find_metrics_cut(lines, 8)
    with lines.open("a") as file:
        file.write('{"kind": "train", "iteration": 13}\n')
    before = lines.read_bytes()
    with pytest.raises(OperationsError, match="changed while it was being cut"):
        cut_out(lines, tmp_path / "part", cut, TEMPORARY)
    assert lines.read_bytes() == before
    assert not (tmp_path / TEMPORARY).exists()


def test_a_cut_keeps_the_permissions_of_the_file(lines: Path, tmp_path: Path) -> None:
    """The file is replaced by a new one with the same permissions."""
    lines.chmod(0o664)
    cut_out(lines, tmp_path / "part", find_metrics_cut(lines, 8), TEMPORARY)
    assert lines.stat().st_mode & 0o777 == 0o664


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system at /dev/shm")
def test_part_and_file_may_be_on_different_file_systems(lines: Path, tmp_path: Path) -> None:
    """The removed part and a complete file can be moved to another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert os.stat(other).st_dev != tmp_path.stat().st_dev
        before = lines.read_bytes()
        part = Path(other) / "a" / "part"
        cut_out(lines, part, find_metrics_cut(lines, 8), TEMPORARY)
        assert lines.read_bytes() + part.read_bytes() == before
        path = event_file(tmp_path / "tb", 9, 12)
        content = path.read_bytes()
        cut_events(path, Path(other) / "a" / path.name)
        assert (Path(other) / "a" / path.name).read_bytes() == content
        assert not path.exists()
