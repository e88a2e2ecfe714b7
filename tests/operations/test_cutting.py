"""What is cut of each kind of record, and that nothing is lost of it."""

import csv
import os
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from operations.run_folder import STARTED, FakeRun, charts, report
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from megatron.config.logging import LoggingConfig
from megatron.errors import OperationsError
from megatron.observe.log_line import format_training_line
from megatron.observe.metrics import read_metrics
from megatron.observe.tensorboard import TensorBoard
from megatron.operations.cutting import (
    CutSpans,
    cut_out,
    find_emissions_cut,
    find_events_cut,
    find_log_cut,
    find_metrics_cut,
    find_when_passed,
)

TEMPORARY = ".cutting"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", tmp_path / "aside")


def records(data: bytes) -> list[bytes]:
    """By TensorBoard's own arithmetic; fails the test where a CRC is wrong or the file ends in a record."""
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
    """One launch's, validated every 4 iterations."""
    board = TensorBoard(LoggingConfig(tensorboard_dir=str(folder)))
    for iteration in range(first, last + 1):
        found = report(iteration, samples=None if ramp_up else 40 * iteration)
        board.write_training(found)
        if iteration % 4 == 0:
            board.write_validation(found.axes, 5.0)
    board.close()
    (path,) = [path for path in folder.iterdir() if ".done" not in path.name]
    return path.rename(path.with_name(f"{path.name}.done{len(list(folder.iterdir()))}"))


def cut_events(path: Path, part: Path, iteration: int = 8) -> CutSpans:
    cut = find_events_cut(path, report(iteration).axes)
    cut_out(path, part, cut, TEMPORARY)
    return cut


@pytest.mark.parametrize(
    "ramp_up", [True, False], ids=["the checkpoint's counters", "another batch size"]
)
def test_events_are_cut_on_every_axis_by_their_own_iteration(tmp_path: Path, ramp_up: bool) -> None:
    path, part = (
        event_file(tmp_path / "tb", 1, 12, ramp_up=ramp_up),
        tmp_path / "parts" / "tb" / "tfevents.part",
    )
    before, points = records(path.read_bytes()), charts(tmp_path / "tb")
    cut = cut_events(path, part)
    kept, gone = records(path.read_bytes()), records(part.read_bytes())
    assert kept[0] == gone[0] == before[0]  # the version
    assert kept + gone[1:] == before
    assert (cut.count, cut.total) == (len(gone) - 1, len(before) - 1)
    for tag, all_points in points.items():
        validation = "validation" in tag
        stay = 2 if validation else 8  # a validation at 8 belongs to 8
        assert charts(tmp_path / "tb")[tag] == all_points[:stay], tag
        assert charts(part.parent)[tag] == all_points[stay:], tag
        assert len(all_points) == (3 if validation else 12)
    assert len(points) == 18
    assert not (tmp_path / "tb" / TEMPORARY).exists()


def test_a_counter_decides_where_the_record_with_the_iteration_is_lost(tmp_path: Path) -> None:
    path = event_file(tmp_path / "tb", 7, 10)

    def keeps(record: bytes) -> bool:
        event = Event.FromString(record[12:-4])
        return (
            not event.summary.value
            or event.summary.value[0].tag == "grad-norm/grad-norm vs samples"
        )

    path.write_bytes(b"".join(record for record in records(path.read_bytes()) if keeps(record)))
    cut_events(path, tmp_path / "part")
    assert [step for step, _ in charts(tmp_path / "tb")["grad-norm/grad-norm vs samples"]] == [
        32,
        40,
    ]  # 7 and 8


def test_a_file_of_later_iterations_only_goes_whole(tmp_path: Path) -> None:
    path, part = event_file(tmp_path / "tb", 9, 12), tmp_path / "parts" / "events.tfevents"
    before = path.read_bytes()
    assert cut_events(path, part).whole
    assert not path.exists()
    assert part.read_bytes() == before


def test_a_file_of_earlier_iterations_is_not_touched(tmp_path: Path) -> None:
    path = event_file(tmp_path / "tb", 1, 8)
    with path.open("ab") as file:
        file.write(b"torn")
    before, stat = path.read_bytes(), path.stat()
    assert cut_events(path, tmp_path / "part").gone == ()
    assert path.read_bytes() == before
    assert path.stat().st_ino == stat.st_ino
    assert not (tmp_path / "part").exists()


@pytest.mark.parametrize("lost", [1, 3, 4, 5, 11, 12, 13, 20, 40])
def test_a_torn_tail_loses_no_good_record(tmp_path: Path, lost: int) -> None:
    path, part = event_file(tmp_path / "tb", 1, 12), tmp_path / "part"
    whole = records(path.read_bytes())
    torn = whole[-1][: len(whole[-1]) - lost]
    path.write_bytes(b"".join(whole[:-1]) + torn)
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == whole[:-1]
    assert (tmp_path / "part.unreadable").read_bytes() == torn


@pytest.mark.parametrize(
    "tail",
    [bytes(4096), b"\xff" * 100, struct.pack("<Q", 3) + b"no CRC of it"],
    ids=["0", "ff", "crc"],
)
def test_a_tail_of_garbage_loses_no_good_record(tmp_path: Path, tail: bytes) -> None:
    path, part = event_file(tmp_path / "tb", 1, 12), tmp_path / "part"
    whole = records(path.read_bytes())
    path.write_bytes(b"".join(whole) + tail)
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == whole
    assert (tmp_path / "part.unreadable").read_bytes() == tail


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    path, part = event_file(tmp_path / "tb", 1, 12), tmp_path / "part"
    whole = records(path.read_bytes())
    damaged = bytearray(whole[30])
    damaged[14] ^= 1
    path.write_bytes(b"".join([*whole[:30], bytes(damaged), *whole[31:]]))
    cut_events(path, part)
    assert records(path.read_bytes()) + records(part.read_bytes())[1:] == whole[:30] + whole[31:]
    assert (tmp_path / "part.unreadable").read_bytes() == bytes(damaged)


def test_an_empty_event_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "events.out.tfevents.1"
    path.touch()
    assert find_events_cut(path, report(8).axes).gone == ()


# Metrics


def cut_metrics(run: FakeRun, part: Path, iteration: int = 8) -> None:
    cut_out(run.metrics, part, find_metrics_cut(run.metrics, iteration), TEMPORARY)


def curve(path: Path) -> dict[int, float]:
    return {entry["iteration"]: entry["lm_loss"] for entry in read_metrics(path)}


def test_metrics_are_cut_by_iteration_and_both_parts_can_be_read(
    run: FakeRun, tmp_path: Path
) -> None:
    run.launch(1, 11)  # the last save is 8
    run.launch(9, 12, scale=2)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    cut_metrics(run, tmp_path / "part")
    kept = run.metrics.read_bytes().splitlines(keepends=True)
    assert kept == lines[: len(kept)]
    assert [*kept, *(tmp_path / "part").read_bytes().splitlines(keepends=True)] == lines
    assert curve(run.metrics) == {i: 10 / i for i in range(1, 9)}
    assert read_metrics(run.metrics)[-1]["validation"] == {"validation": 1.25}
    assert curve(tmp_path / "part") == {i: 20 / i for i in range(9, 13)}


def test_what_an_earlier_return_by_hand_left_stays_left_out(run: FakeRun, tmp_path: Path) -> None:
    run.launch(1, 12)
    run.back_to(4)
    run.launch(5, 9, scale=2)
    cut_metrics(run, tmp_path / "part")
    assert curve(run.metrics) == {i: (10 if i <= 4 else 20) / i for i in range(1, 9)}


def test_torn_lines_go_with_the_line_before(run: FakeRun, tmp_path: Path) -> None:
    run.launch(1, 12)
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    torn = lines[3][:20] + b"\n"
    path = run.metrics
    path.write_bytes(b"".join([*lines[:3], torn, *lines[4:], b'{"kind": "train", "itera']))
    cut_metrics(run, tmp_path / "part")
    assert torn in path.read_bytes()
    assert (tmp_path / "part").read_bytes().endswith(b'{"kind": "train", "itera')
    assert sorted(curve(path)) == [1, 2, *range(4, 9)]


def test_the_moment_is_that_of_the_last_passage(run: FakeRun) -> None:
    run.launch(1, 12)
    passage = find_when_passed(run.metrics, 8)
    assert (passage.to, passage.passed, passage.moment) == (
        12,
        True,
        STARTED + timedelta(minutes=9),
    )
    run.back_to(4)
    run.launch(5, 8)
    assert find_when_passed(run.metrics, 8).moment is None  # nothing is later than this passage
    assert not find_when_passed(run.metrics, 0).passed


# Emissions


def test_emissions_are_cut_by_the_moment_and_both_parts_are_tables(
    run: FakeRun, tmp_path: Path
) -> None:
    run.launch(1, 16)
    path = run.codecarbon / "emissions.csv"
    with path.open("a") as file:
        file.write("2026-01-3")  # torn
    cut_out(
        path,
        tmp_path / "part.csv",
        find_emissions_cut(path, STARTED + timedelta(minutes=9)),
        TEMPORARY,
    )
    kept, gone = (
        [row["duration"] for row in csv.DictReader(file.open())]
        for file in (path, tmp_path / "part.csv")
    )
    assert kept == ["240", "480"]
    assert gone == ["720", "960", None]


def test_emissions_of_the_moments_own_second_stay(run: FakeRun) -> None:
    run.launch(1, 8)
    path = run.codecarbon / "emissions.csv"
    at = STARTED + timedelta(minutes=8)
    assert find_emissions_cut(path, at + timedelta(milliseconds=200)).gone == ()
    assert find_emissions_cut(path, at - timedelta(seconds=1)).count == 1
    assert find_emissions_cut(path, None).gone == ()


def test_a_table_without_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "emissions.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(OperationsError, match="no column 'timestamp'"):
        find_emissions_cut(path, datetime.now(UTC))


# Log


def line(iteration: int) -> str:
    return f"[default7]:{format_training_line(report(iteration))}"


def saved(iteration: int) -> str:
    return f" successfully saved checkpoint at iteration {iteration:7d} to /run"


def validated(iteration: int) -> str:
    return f" validation loss at iteration {iteration} | lm loss value: 1.0E+00 | lm loss PPL: 2.7E+00 |"


LOADED = "successfully loaded checkpoint from /run at iteration 8"


@pytest.mark.parametrize(
    ("kept", "gone"),
    [
        (
            ["srun", line(7), line(8), validated(8), saved(8)],
            ["noise", line(9), line(12), validated(12), saved(12)],
        ),
        # the log interval passes 8 over: its save tells
        (["srun", line(5), saved(8)], ["noise", line(10), "exiting program at iteration 12"]),
        # --async-save: done later
        ([line(7), line(8)], [line(9), saved(8), line(10)]),
        # over launches: the first one was killed behind its save, the second one came from there
        ([line(8), saved(8)], [line(9), line(10), "srun", LOADED, line(9), line(12), saved(12)]),
        # went back by hand before: the last passage counts
        (
            [line(8), saved(8), line(12), saved(12), "srun", line(5), line(8), saved(8)],
            [line(9), saved(12)],
        ),
        # nothing of 8 or before
        ([], ["srun", line(9), line(12)]),
        # nothing later
        ([line(7), line(8), saved(8)], []),
    ],
)
@pytest.mark.parametrize("end", ["\n", ""], ids=["", "torn"])
def test_the_log_is_cut_behind_the_last_line_of_the_iteration(
    tmp_path: Path, kept: list[str], gone: list[str], end: str
) -> None:
    path, part = tmp_path / "main_log.txt", tmp_path / "part"
    path.write_text("\n".join([*kept, *gone]) + end)
    cut_out(path, part, find_log_cut(path, 8), TEMPORARY)
    assert path.read_text() == "\n".join(kept) + ("" if not kept else "\n" if gone else end)
    assert part.exists() == bool(gone)
    assert not gone or part.read_text() == "\n".join(gone) + end


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "main_log.txt"
    path.write_text("iteration is a word\n")
    with pytest.raises(OperationsError, match="no line of an iteration"):
        find_log_cut(path, 8)


# Cutting itself


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"kind": "train", "iteration": {i}}}\n' for i in range(1, 13)))
    return path


def test_again_after_a_cut_off_before_the_file_changed(lines: Path, tmp_path: Path) -> None:
    whole, part, cut = lines.read_bytes(), tmp_path / "part", find_metrics_cut(lines, 8)
    cut_out(lines, part, cut, TEMPORARY)
    kept, gone = lines.read_bytes(), part.read_bytes()
    lines.write_bytes(whole)
    cut_out(lines, part, find_metrics_cut(lines, 8), TEMPORARY)
    assert (lines.read_bytes(), part.read_bytes()) == (kept, gone)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "part"]


def test_a_part_that_holds_something_else_is_left(lines: Path, tmp_path: Path) -> None:
    (tmp_path / "part").write_text("precious")
    cut_out(lines, tmp_path / "part", find_metrics_cut(lines, 8), TEMPORARY)
    assert (tmp_path / "part").read_text() == "precious"
    assert len((tmp_path / "part.2").read_text().splitlines()) == 4


def test_a_file_that_is_being_written_is_left_whole(lines: Path, tmp_path: Path) -> None:
    cut = find_metrics_cut(lines, 8)
    with lines.open("a") as file:
        file.write('{"kind": "train", "iteration": 13}\n')
    before = lines.read_bytes()
    with pytest.raises(OperationsError, match="end what writes to it"):
        cut_out(lines, tmp_path / "part", cut, TEMPORARY)
    assert lines.read_bytes() == before
    assert not (tmp_path / TEMPORARY).exists()


def test_permissions_stay(lines: Path, tmp_path: Path) -> None:
    lines.chmod(0o664)
    cut_out(lines, tmp_path / "part", find_metrics_cut(lines, 8), TEMPORARY)
    assert lines.stat().st_mode & 0o777 == 0o664


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system at /dev/shm")
def test_part_and_file_may_be_on_different_file_systems(lines: Path, tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        assert os.stat(other).st_dev != tmp_path.stat().st_dev
        whole = lines.read_bytes()
        cut_out(lines, Path(other) / "a" / "part", find_metrics_cut(lines, 8), TEMPORARY)
        assert lines.read_bytes() + (Path(other) / "a" / "part").read_bytes() == whole
        path = event_file(tmp_path / "tb", 9, 12)
        content = path.read_bytes()
        cut_events(path, Path(other) / "a" / path.name)
        assert (Path(other) / "a" / path.name).read_bytes() == content
        assert not path.exists()
