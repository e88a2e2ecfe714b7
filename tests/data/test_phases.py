"""The phases of --data-phases: the file, where they begin, and the order of samples."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from data.corpora import write_numbered
from data.source_requests import open_sources

from megatron.base.errors import ConfigError
from megatron.base.json_record import restore
from megatron.config.data import DataConfig
from megatron.data.phases import (
    DataPhase,
    PlannedPhase,
    check_phase_data,
    find_phase_shares,
    plan_phases,
    read_phases,
)
from megatron.data.source import Sources
from megatron.schedule.batch_size import ConstantBatchSize, RampupBatchSize, parse_step_schedule
from megatron.schedule.curriculum import Curriculum
from megatron.schedule.lr import LRSchedule
from megatron.schedule.position import Forecast, Progress, Steps

# 300 tokens, which give 29 samples in each epoch.
SEQ = 10
DOCUMENTS = 12
SIZE = 25
FIRST_OF_B = 1_000_000
FIRST_OF_C = 2_000_000


def write(folder: Path, text: str) -> str:
    path = folder / "phases.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_phases_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "- data_path: data/web\n"
        "- from_iteration: 1_678_001\n  data_path: [0.7, data/web, 3e-1, data/code]\n  seed: 29\n"
        "- from_tokens: 1.5T\n  train_weighted_split_paths: 'train: 1 0:0.9 data/math'\n",
    )
    assert read_phases(path) == (
        DataPhase(f"{path}:1", data_path=("data/web",)),
        DataPhase(
            f"{path}:2",
            data_path=("0.7", "data/web", "3e-1", "data/code"),
            seed=29,
            from_iteration=1_678_001,
        ),
        DataPhase(
            f"{path}:5",
            train_weighted_split_paths=("train: 1 0:0.9 data/math",),
            from_tokens=1_500_000_000_000,
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a list"),
        ("data_path: a\n", "must be a list"),
        ("- [a\n", "is not YAML"),
        ("- a\n", "must be a mapping"),
        ("- seed: 1\n", "phases.yaml:1 must have either data_path or train"),
        (
            "- data_path: a\n  train_weighted_split_paths: b\n",
            "either data_path or train_weighted_split_paths",
        ),
        ("- data_path: a\n  lr: 1\n", "phases.yaml:2 has an unknown key 'lr'; the keys"),
        ("- data_path: a\n  data_path: b\n", "gives 'data_path' again"),
        ("- data_path: a\n  seed: -1\n", "phases.yaml:2 seed -1 must be at least 0"),
        ("- data_path: a\n  seed: x\n", "seed must be a whole number"),
        ("- data_path: a\n  from_iteration: 2\n", "is the first phase"),
        ("- data_path: a\n- data_path: b\n", "phases.yaml:2 must have either from_iteration"),
        ("- data_path: a\n- data_path: b\n  from_tokens: 1e\n", "'1e' must be a number"),
        ("- data_path: a\n- data_path: b\n  from_tokens: [1]\n", "must be a number"),
        ("- data_path: a\n- data_path: b\n  from_iteration: 0\n", "must be at least 1"),
        (
            "- data_path: a\n- data_path: b\n  from_iteration: 3\n  from_tokens: 1M\n",
            "either from_iteration or from_tokens",
        ),
        ("- data_path: a\n- data_path: b\n  from_iteration: 1\n", "must be above 1"),
        (
            "- data_path: a\n- data_path: b\n  from_tokens: 9\n- data_path: b\n  from_tokens: 9\n",
            "from_tokens 9 must be above 9",
        ),
        ("- data_path: !!python/object:os.system a\n", "without the tag"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_phases(write(tmp_path, text))


def test_phases_of_streamed_data_are_read(tmp_path: Path) -> None:
    """A list in brackets means the same as the value of the flag."""
    path = write(
        tmp_path,
        "- datasets: web\n"
        "- from_iteration: 7\n  datasets: [web, code/python]\n  weights: [3, 1e-1]\n"
        "- from_tokens: 1T\n  datasets: web,math\n  weights: 1,2\n",
    )
    phases = read_phases(path, streamed=True)
    assert phases == (
        DataPhase(f"{path}:1", datasets="web"),
        DataPhase(f"{path}:2", datasets="web,code/python", weights="3,1e-1", from_iteration=7),
        DataPhase(f"{path}:5", datasets="web,math", weights="1,2", from_tokens=10**12),
    )
    data = DataConfig(dataset_format="parquet", data_path=("corpus",), data_phases=path)
    assert find_phase_shares(data, phases[2]) == {"web": 1 / 3, "math": 2 / 3}


@pytest.mark.parametrize(
    ("text", "streamed", "message"),
    [
        ("- data_path: a\n", True, "the key 'data_path', which is for the other kind of data"),
        ("- datasets: a\n  seed: 3\n", True, "the whole run has one seed"),
        ("- datasets: a\n", False, "it needs --dataset-format"),
        ("- weights: '1'\n", True, "phases.yaml:1 must have datasets"),
        ("- datasets: []\n", True, "phases.yaml:1 must have datasets"),
        ("- datasets: [[a]]\n", True, "phases.yaml:1 datasets must be"),
        ("- datasets: [null]\n", True, "phases.yaml:1 datasets has an entry without a value"),
        ("- dataset: a\n", True, "perhaps you meant 'datasets'"),
        ("a\n", True, "as in '- datasets: web,code'"),
    ],
)
def test_keys_of_the_other_kind_of_data_are_refused(
    text: str, streamed: bool, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        read_phases(write(tmp_path, text), streamed=streamed)


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (DataPhase("p.yaml:4", datasets="a,../b"), "p.yaml:4: --datasets"),
        (DataPhase("p.yaml:4", datasets="a,b", weights="1"), "one positive number for each of"),
        (DataPhase("p.yaml:4", datasets="a,b", weights="1,0"), "one positive number for each of"),
        (DataPhase("p.yaml:4", datasets="a,a"), "has a name twice"),
    ],
)
def test_wrong_data_of_a_streamed_phase(phase: DataPhase, message: str) -> None:
    data = DataConfig(dataset_format="parquet", data_path=("corpus",), data_phases="p.yaml")
    with pytest.raises(ConfigError, match=message):
        check_phase_data(data, phase)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_phases(str(tmp_path / "none.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_phases(str(tmp_path / "binary.yaml"))


SCHEDULES = {
    "constant": Steps(ConstantBatchSize(8), 100),
    "ramp-up": Steps(RampupBatchSize(2, 3, 100, 14), 100),
    "steps": Steps(parse_step_schedule(["0:4", "10K:6", "333samples:8"], 100), 100),
    "curriculum": Steps(
        RampupBatchSize(2, 3, 100, 14),
        96,
        Curriculum("fixed_linear", 16, 96, total_curriculum_step=30, difficulty_step=8),
    ),
}


@pytest.mark.parametrize("steps", SCHEDULES.values(), ids=SCHEDULES)
def test_positions_are_those_of_a_loop_over_all_iterations(steps: Steps) -> None:
    forecast = Forecast(
        steps.batch_size, LRSchedule(1, 0, "constant", 0, 1), steps.seq_length, steps.curriculum
    )
    points = forecast.predict(range(120))
    start = points[7]
    begin = Progress(7, start.consumed_samples, start.consumed_tokens)
    for point in points[7:]:
        expected = Progress(point.iteration, point.consumed_samples, point.consumed_tokens)
        assert steps.find_iteration(begin, point.iteration) == expected
        assert steps.find_tokens(begin, point.consumed_tokens) == expected
        if point.iteration > 7:
            assert steps.find_tokens(begin, point.consumed_tokens - 1) == expected
    assert steps.find_iteration(begin, 3) == begin
    assert steps.find_tokens(begin, 1) == begin


def test_millions_of_iterations_are_found_at_once() -> None:
    """The phases of Apertus 8B (https://arxiv.org/abs/2509.14233)."""
    steps = Steps(RampupBatchSize(1024, 1024, 1_718_272_000, 2048), 4096)
    phases = [
        DataPhase("1", ("a",)),
        *(
            DataPhase(str(at), ("a",), from_iteration=at + 1)
            for at in (1_678_000, 2_269_525, 2_429_920)
        ),
    ]
    planned = plan_phases(phases, steps, Progress())
    assert [each.first_iteration for each in planned] == [1, 1_678_001, 2_269_526, 2_429_921]
    assert planned[1].start_sample * 4096 == 7_038_042_112_000
    assert planned[2].start_sample == planned[1].start_sample + 2048 * (2_269_525 - 1_678_000)


def test_phases_in_different_units_are_sorted() -> None:
    steps = Steps(ConstantBatchSize(2), 10)
    phases = [DataPhase("first", ("a",)), DataPhase("by tokens", ("a",), from_tokens=101)]
    planned = plan_phases(phases, steps, Progress())
    # The first iteration that starts with at least 101 tokens: 6 x 20 are 120.
    assert (planned[1].first_iteration, planned[1].start_sample) == (7, 12)
    for wrong in (6, 7):
        late = [*phases, DataPhase("late", ("a",), from_iteration=wrong)]
        with pytest.raises(ConfigError, match="late: the phase begins with iteration"):
            plan_phases(late, steps, Progress())
    # After iteration 20 at another batch size, both have started.
    later = plan_phases(
        [*phases, DataPhase("next", ("a",), from_iteration=25)], steps, Progress(20, 500, 5000)
    )
    assert [each.started for each in later] == [True, True, False]
    assert (later[2].first_iteration, later[2].start_sample) == (25, 508)


def test_phases_that_have_started_stay_in_order_with_larger_batches() -> None:
    phases = [
        DataPhase("1", ("a",)),
        DataPhase("2", ("a",), from_iteration=4),
        DataPhase("3", ("a",), from_tokens=100),
    ]
    # With 2 samples of 10 tokens, the third phase began with iteration 6.
    position = Progress(7, 14, 140)
    planned = plan_phases(phases, Steps(ConstantBatchSize(16), 10), position)
    assert [each.started for each in planned] == [True] * 3
    assert [each.first_iteration for each in planned] == [1, 4, 4]
    assert all(each.start_sample <= position.samples for each in planned)
    # A phase that has started cannot follow one that has not.
    phases[1] = DataPhase("2", ("a",), from_iteration=40)
    with pytest.raises(ConfigError, match="3: the phase begins with iteration"):
        plan_phases(phases, Steps(ConstantBatchSize(16), 10), position)


@pytest.fixture
def corpora(tmp_path: Path) -> tuple[str, str, str]:
    """Three corpora whose tokens show the data set and the position in it."""

    def write_corpus(name: str, first: int) -> str:
        return write_numbered(tmp_path / name, documents=DOCUMENTS, size=SIZE, first=first)

    return write_corpus("a", 0), write_corpus("b", FIRST_OF_B), write_corpus("c", FIRST_OF_C)


class Runs:
    """Builds the sources of runs whose batch size is 1, so that iteration and sample are equal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def build(self, *phases: DataPhase, samples: int, consumed: int = 0, seed: int = 1) -> Sources:
        config = DataConfig(
            data_phases="phases.yaml",
            split="1,0,0",
            data_cache_path=str(self.folder / "cache"),
            num_workers=2,
        )
        steps = Steps(ConstantBatchSize(1), SEQ)
        planned = plan_phases(phases, steps, Progress(consumed, consumed, consumed * SEQ))
        return open_sources(config, samples, seq_length=SEQ, seed=seed, phases=planned)

    def resume(self, old: Sources, *phases: DataPhase, samples: int, seed: int = 1) -> Sources:
        state = json.loads(json.dumps(old.state()))
        new = self.build(
            *phases, samples=samples, consumed=state["train"]["consumed_samples"], seed=seed
        )
        new.load(state)
        return new


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def draw(sources: Sources, count: int) -> list[int]:
    """Return the first token of each of the next samples."""
    assert sources.train is not None
    return [int(sources.train.read_batch(1)[0].tokens[0, 0]) for _ in range(count)]


def describe(corpora: tuple[str, str, str]) -> tuple[DataPhase, DataPhase, DataPhase]:
    a, b, c = corpora
    return (
        DataPhase("1", (a,)),
        DataPhase("2", ("0.5", a, "0.5", b), from_iteration=11, seed=7),
        DataPhase("3", (c,), from_iteration=31),
    )


def test_each_phase_reads_its_mixture(runs: Runs, corpora: tuple[str, str, str]) -> None:
    phases = describe(corpora)
    drawn = draw(runs.build(*phases, samples=45), 45)
    assert all(token < FIRST_OF_B for token in drawn[:10])
    in_second = np.array(drawn[10:30])
    assert (in_second < FIRST_OF_B).sum() == 10
    assert ((in_second >= FIRST_OF_B) & (in_second < FIRST_OF_C)).sum() == 10
    assert all(token >= FIRST_OF_C for token in drawn[30:])
    assert len(set(drawn)) == 45, "no sample is drawn twice, also of the data that two phases read"
    # The first phase is as in a run without the others, and the seed of a phase counts.
    assert draw(runs.build(phases[0], samples=10), 10) == drawn[:10]
    other = draw(
        runs.build(phases[0], DataPhase("2", phases[1].data_path, (), 8, 11), samples=30), 30
    )
    assert other[:10] == drawn[:10]
    assert other[10:] != drawn[10:30]


@pytest.mark.parametrize("interruptions", [(4,), (10,), (11,), (17, 30), (30, 31, 40), (9, 10, 11)])
def test_an_interrupted_run_reads_the_same(
    runs: Runs, corpora: tuple[str, str, str], interruptions: tuple[int, ...]
) -> None:
    phases = describe(corpora)
    uninterrupted = draw(runs.build(*phases, samples=45), 45)
    sources = runs.build(*phases, samples=45)
    drawn: list[int] = []
    for at in interruptions:
        drawn += draw(sources, at - len(drawn))
        sources.take_notes()
        sources = runs.resume(sources, *phases, samples=45)
        assert sources.take_notes() == []
    assert drawn + draw(sources, 45 - len(drawn)) == uninterrupted


def test_phases_ahead_may_change_on_a_resume(runs: Runs, corpora: tuple[str, str, str]) -> None:
    _, b, _ = corpora
    first, second, third = describe(corpora)
    expected = draw(runs.build(first, third, samples=40), 40)
    old = runs.build(first, second, third, samples=45)
    before = draw(old, 6)
    # The second phase is removed, and the first one is longer than its index was made for.
    new = runs.resume(old, first, third, samples=40)
    after = draw(new, 34)
    assert all(token < FIRST_OF_B for token in after[:24])
    assert len(set(before + after[:24])) == 30 - 1, "29 samples make an epoch"
    assert after[24:] == expected[30:]
    # A phase may be added to a run that had none.
    in_one_epoch = draw(runs.build(first, samples=25), 25)
    plain = runs.build(first, samples=20)
    assert draw(plain, 20) == in_one_epoch[:20]
    longer = runs.resume(plain, first, DataPhase("2", (b,), from_iteration=26), samples=40)
    assert draw(longer, 5) == in_one_epoch[20:]
    assert all(FIRST_OF_B <= token < FIRST_OF_C for token in draw(longer, 15))
    # Another seed of a phase that has started shuffles what it has not read.
    again = runs.resume(longer, first, samples=50)
    (note,) = [note for note in again.take_notes() if "changed" in note]
    assert "the data, their weights or --split have changed; from sample 40 on" in note


def test_a_phase_that_begins_at_the_checkpoint_may_be_moved(
    runs: Runs, corpora: tuple[str, str, str]
) -> None:
    first, second, third = describe(corpora)
    old = runs.build(first, second, third, samples=60)
    before = draw(old, 30)
    later = DataPhase("3", third.data_path, from_iteration=41)
    new = runs.resume(old, first, second, later, samples=60)
    notes = "\n".join(new.take_notes())
    assert "changed" not in notes, "neither data nor seed of the second phase changed"
    after = draw(new, 30)
    assert len(set(before + after)) == 60, "no sample is drawn twice"
    assert all(token < FIRST_OF_C for token in after[:10])
    assert all(token >= FIRST_OF_C for token in after[10:30])


def test_data_of_a_phase_that_is_over_may_be_removed(
    runs: Runs, corpora: tuple[str, str, str]
) -> None:
    phases = describe(corpora)
    expected = draw(runs.build(*phases, samples=45), 45)
    old = runs.build(*phases, samples=45)
    draw(old, 33)
    for suffix in (".bin", ".idx"):
        Path(corpora[1] + suffix).unlink()
    assert draw(runs.resume(old, *phases, samples=45), 12) == expected[33:]


def test_a_later_end_keeps_what_was_read(runs: Runs, corpora: tuple[str, str, str]) -> None:
    phases = describe(corpora)
    old = runs.build(*phases, samples=40)
    first = draw(old, 20)
    # The third phase has not started, so it is that of a run that starts with 70 samples.
    new = runs.resume(old, *phases, samples=70)
    assert first + draw(new, 50) == draw(runs.build(*phases, samples=70), 70)


def test_a_phase_with_equal_data_is_not_recorded_again(
    runs: Runs, corpora: tuple[str, str, str]
) -> None:
    a, _, _ = corpora
    phases = (DataPhase("1", (a,)), DataPhase("2", (a,), from_iteration=6))
    sources = runs.build(*phases, samples=60)
    drawn = draw(sources, 2)
    count = len(sources.state()["train"]["segments"])
    for _ in range(3):
        sources = runs.resume(sources, *phases, samples=60)
        drawn += draw(sources, 1)
        assert len(sources.state()["train"]["segments"]) == count
    drawn += draw(sources, 55)
    assert len(set(drawn[:29])) == 29, "each sample once in the first epoch"
    assert drawn == draw(runs.build(*phases, samples=60), 60)


def test_a_planned_phase_survives_json() -> None:
    phase = DataPhase("p.yaml:3", ("a", "b"), ("c",), seed=3, from_iteration=6)
    planned = PlannedPhase(phase, 6, 40, started=True)
    record = json.loads(json.dumps(dataclasses.asdict(planned)))
    assert restore(PlannedPhase, record) == planned
