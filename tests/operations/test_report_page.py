"""The page of a report: its content for a run with kills, rollbacks, skips and dropped steps."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from operations.chromium import CHROMIUM, start_browser

from megatron.console.figure import save_figure
from megatron.extras.operations.chronicle.charts import Charts, Curve, build_charts, find_stretches
from megatron.extras.operations.chronicle.events import describe_events
from megatron.extras.operations.chronicle.history import RunHistory, read_history
from megatron.extras.operations.chronicle.summary import describe_outcome, list_facts
from megatron.extras.operations.commands import chronicle
from megatron.observe.chronicle import CHRONICLE

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
SPIKE = 7.5
HOSTILE = '</script><script>document.title="owned"</script><img src="http://example.com/x.png">'


def write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def at(second: float) -> str:
    return (BEGAN + timedelta(seconds=second)).isoformat(timespec="milliseconds")


def train(iteration: int, second: float, *, dropped: float | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kind": "train",
        "iteration": iteration,
        "time": at(second),
        "consumed_samples": 16 * iteration,
        "consumed_tokens": 1024 * iteration,
        "global_batch_size": 16,
        "learning_rate": 1e-3 / iteration,
        "seconds": 1.0,
        "skipped_iterations": 0,
        "lm_loss": 2 + 3 / iteration,
        "dropped_loss": None,
        "grad_norm": 0.5 + 1 / iteration,
        "data_wait_seconds": 0.001 * (1 + iteration % 3),
    }
    if iteration % 5 == 0:
        record["layer_grad_norm"] = [0.1 * iteration, 0.2 * iteration]
    if dropped is not None:
        record |= {"lm_loss": None, "dropped_loss": dropped, "skipped_iterations": 1}
    return record


def event(second: float, kind: str, iteration: int | None, **details: Any) -> dict[str, Any]:
    return {"time": at(second), "kind": kind, "iteration": iteration, "details": details}


def start(second: float, iteration: int, **settings: str) -> dict[str, Any]:
    flags = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    shape = {"devices": 8, "layers": 4, "train_iterations": 60}
    return event(second, "start", iteration, seconds=1.0, settings=flags, **shape)


def write_run(folder: Path, *, lr: str = "0.001", note: str = HOSTILE) -> Path:
    """Write a run of 60 iterations.

    It is killed after 23 and resumes from 20. The spike guard drops 31 to 33, goes back to 30 and
    skips 31 to 40. A person rolls back from 55 to 50. In the last launch, 52 is dropped.
    """
    rows = [{"kind": "start", "iteration": 0, "time": at(0)}]
    rows += [train(iteration, iteration) for iteration in range(1, 24)]
    rows.append({"kind": "start", "iteration": 20, "time": at(100)})
    rows += [train(iteration, 80 + iteration) for iteration in range(21, 31)]
    removed = [train(iteration, 80 + iteration, dropped=SPIKE) for iteration in (31, 32, 33)]
    write_lines(folder / "rolled-back" / "guard" / "metrics.jsonl", removed)
    rows.append({"kind": "start", "iteration": 30, "time": at(115)})
    rows += [train(iteration, 80 + iteration) for iteration in range(41, 51)]
    undone = [train(iteration, 80 + iteration) for iteration in range(51, 56)]
    write_lines(folder / "rolled-back" / "person" / "metrics.jsonl", undone)
    rows.append({"kind": "start", "iteration": 50, "time": at(200)})
    rows += [
        train(iteration, 150 + iteration, dropped=SPIKE + 1 if iteration == 52 else None)
        for iteration in range(51, 61)
    ]
    rows += [
        {
            "kind": "validation",
            "iteration": each,
            "name": "held-out",
            "lm_loss": 3.0,
            "time": at(205),
        }
        for each in (10, 20, 60)
    ]
    write_lines(folder / "metrics.jsonl", rows)
    alert = "spike guard: iteration {} is a spike and it was dropped: the loss is high"
    write_lines(
        folder / CHRONICLE,
        [
            start(0, 0, lr=lr),
            event(20.1, "save", 20),
            start(100, 20, lr=lr),
            event(111.1, "alert", 31, text=alert.format(31)),
            event(112.1, "alert", 32, text=alert.format(32)),
            event(113.2, "stop", 33, reason="rollback", save_seconds=0.0),
            start(115, 30, lr=lr),
            event(115.1, "skip", 40, first=31, last=40),
            event(135.2, "stop", 55, reason="signal", save_seconds=0.335),
            event(140, "note", None, text=note),
            start(200, 50, lr='"0.0005"', seed="7"),
            event(202.1, "alert", 52, text=alert.format(52)),
            event(210.2, "stop", 60, reason="complete"),
        ],
    )
    guard = {"action": "spike-guard", "reason": "the loss is high", "dropped": True}
    skip = {"time": at(111), **guard, "decision": "skip-step", "iteration": 31, "loss": SPIKE}
    decided = {"decision": "rollback", "iteration": 33, "to": 30, "skip": [31, 40]}
    parts = {"parts": "guard", "files": [{"kind": "metrics", "part": "metrics.jsonl"}]}
    done = {"action": "rollback", "trained_to": 33, "to": 30, "skip": ["31-40"]}
    by_person = {"action": "rollback", "trained_to": 55, "to": 50, "reason": "looked odd"}
    write_lines(
        folder / "interventions.jsonl",
        [
            skip,
            {**skip, "time": at(112), "iteration": 32},
            {"time": at(113.1), **guard, "loss": SPIKE, **decided},
            {"time": at(113), **done, **parts, "reason": "spike guard at iteration 33: the loss"},
            {"time": at(150), **by_person, **parts, "parts": "person"},
            {**skip, "time": at(202), "iteration": 52, "loss": SPIKE + 1},
        ],
    )
    return folder


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    return read_history(write_run(tmp_path_factory.mktemp("report") / "run"))


def draw(history: RunHistory) -> Charts:
    return build_charts([history], ["run"], [describe_events(history)])


def list_lines(curve: Curve) -> list[list[float]]:
    """Return the iterations of each part of a curve that is drawn without a gap."""
    parts: list[list[float]] = [[]]
    for iteration, value in zip(curve.x["iteration"], curve.y[1], strict=True):
        if iteration is None or value is None:
            parts.append([])
        else:
            parts[-1].append(iteration)
    return [part for part in parts if part]


def test_no_line_joins_what_was_not_trained(history: RunHistory) -> None:
    charts = draw(history)
    loss, norm = (
        next(p for p in charts.panels if p.key == key) for key in ("lm_loss", "grad_norm")
    )
    (kept,) = (curve for curve in norm.curves if curve.kind == "kept")
    assert [(part[0], part[-1]) for part in list_lines(kept)] == [
        (1, 20),
        (21, 30),
        (41, 50),
        (51, 60),
    ]
    (abandoned,) = (curve for curve in norm.curves if curve.kind == "abandoned")
    ends = [(part[0], part[-1]) for part in list_lines(abandoned)]
    assert ends == [(21, 23), (31, 33), (51, 55)]
    (kept,) = (curve for curve in loss.curves if curve.kind == "kept")
    # The loss has a gap at the dropped step too.
    assert [(part[0], part[-1]) for part in list_lines(kept)][-2:] == [(51, 51), (53, 60)]
    bands = [(band.kind, band.x["iteration"]) for band in charts.bands]
    assert bands == [
        ("abandoned", [21, 23]),
        ("abandoned", [31, 33]),
        ("abandoned", [51, 55]),
        ("skipped", [31, 40]),
    ]


def test_sparse_values_are_joined() -> None:
    iterations = np.array([5.0, 10.0, 15.0, 30.0, 35.0])
    assert find_stretches(iterations).tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize("has_key", [True, False])
def test_dropped_step_is_marked_with_its_loss(tmp_path: Path, has_key: bool) -> None:
    """Earlier versions recorded the loss of a dropped step only in the guard's file."""
    folder = write_run(tmp_path / "run")
    if not has_key:
        for path in folder.rglob("metrics.jsonl"):
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            write_lines(path, [{k: row[k] for k in row if k != "dropped_loss"} for row in rows])
    loss = draw(read_history(folder)).panels[0]
    marks = [(mark.x["iteration"][0], mark.y) for mark in loss.marks]
    assert marks == [(31, SPIKE), (32, SPIKE), (33, SPIKE), (52, SPIKE + 1)]


def test_each_event_is_listed_once_in_plain_words(history: RunHistory) -> None:
    described = [(each.label, each.event.iteration, each.text) for each in describe_events(history)]
    labels = [label for label, _, _ in described]
    assert labels == [
        "launch",
        "checkpoint",
        "killed",
        "launch",
        "spike",
        "rollback",
        "continued",
        "skipped data",
        "stop",
        "note",
        "rollback",
        "launch",
        "spike",
        "stop",
    ]
    texts = [text for _, _, text in described]
    assert described[2][1:] == (
        23,
        "the launch was killed or lost, and recorded no end; "
        "iterations lost since the last checkpoint: 3",
    )
    assert texts[4].startswith("iterations 31 to 32: 2 steps dropped; ")
    assert "from iteration 33 to 30; skips the data of 31 to 40" in texts[5]
    assert texts[7] == "iterations 31 to 40 were skipped"
    assert texts[8] == "by a signal; the last checkpoint took 0.3 s"
    assert "--lr 0.001 -> 0.0005, --seed default -> 7" in texts[11]


def test_facts_count_launches_and_rollbacks(history: RunHistory) -> None:
    facts = dict(list_facts(history))
    assert facts["launches"] == "3, 1 of them killed or lost"
    assert facts["rollbacks"] == "2, 1 of them by the spike guard without a new launch"
    assert facts["iterations that were undone"] == "11 (11.0 s)"
    assert facts["steps that were dropped"] == "1 (1.0 s)"
    assert facts["iterations whose data were skipped"] == "10"
    text = " ".join(describe_outcome(history))
    assert "at iteration 60 of 60, with a training loss of 2.0500 and 3.0000 on held-out" in text
    assert "from 2026-01-01 00:00 to 2026-01-01 00:03 (UTC), 3 min 31 s in all" in text
    assert "The end of the last launch: the training is complete." in text


def test_constant_curve_is_a_line_of_text(history: RunHistory) -> None:
    charts = draw(history)
    assert charts.constants == [("batch size [samples]", "16")]
    keys = [panel.key for panel in charts.panels]
    assert "global_batch_size" not in keys
    assert {"data_wait_seconds", "layer_grad_norm"} <= set(keys)


def write_page(folder: Path, *runs: Path) -> str:
    page = folder / "report.html"
    assert chronicle.main([*map(str, runs), "--html", str(page)]) == 0
    return page.read_text()


def test_page_shows_settings_and_their_differences(tmp_path: Path) -> None:
    first = write_run(tmp_path / "first")
    second = write_run(tmp_path / "second", lr="0.002")
    alone = write_page(tmp_path, first)
    changed = alone.partition("Settings that changed between launches")[2]
    rows = re.findall(r"<tr><td><code>([^<]+)</code></td>(.*?)</tr>", changed)
    assert [flag for flag, _ in rows] == ["--lr", "--seed"]
    assert "Settings in which the runs differ" not in alone
    # The summary names the main settings, and leads to the table of all of them.
    assert "; learning rate 0.0005. " in alone
    assert alone.count('href="#settings-first"') == alone.count('id="settings-first"') == 1
    # The last launches of both have the same settings.
    assert "All settings are equal." in write_page(tmp_path, first, second)
    events = second / CHRONICLE
    events.write_text(events.read_text().replace("0.0005", "0.0007"))
    both = write_page(tmp_path, first, second)
    differing = both.partition("Settings in which the runs differ")[2].partition("</table>")[0]
    assert "<td><code>--lr</code></td><td>0.0005</td><td>0.0007</td>" in differing
    assert "--seed" not in differing


def test_runs_of_the_same_name_have_different_names(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run") for name in ("first", "second")]
    text = write_page(tmp_path, *runs)
    for name in ("first/run", "second/run"):
        assert f"<h2>{name}</h2>" in text
        assert f'"name":"{name}: loss"' in text
        # It is in the legend and in the table of differences too.
        assert f"</svg>{name}</span>" in text


def test_page_has_the_elements_of_its_charts(tmp_path: Path) -> None:
    text = write_page(tmp_path, write_run(tmp_path / "run"))
    drawings = re.findall(r"<svg viewBox=\"0 0 1000.*?</svg>", text, re.DOTALL)
    # Loss, events, gradient norm, learning rate, goodput, wait for data, and layers.
    assert len(drawings) == 7
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert len(root.findall(".//rect[@class='skipped']")) == 1
    assert len(re.findall(r'<path class="dropped', drawings[0])) == 4
    assert len(text) < 200_000
    # On paper and in a window, the text does not touch the edge.
    padding = re.search(r"^body \{\s*margin: [^;]*; padding: (\d+)px (\d+)px (\d+)px;", text, re.M)
    assert padding is not None
    assert min(map(int, padding.groups())) >= 20
    paper = re.search(r"@page \{ margin: (\d+)mm; \}", text)
    assert paper is not None
    assert int(paper[1]) >= 10


def test_the_picture_has_each_trained_iteration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    drawn = []

    def keep(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save_figure(figure, path)

    monkeypatch.setattr("megatron.extras.operations.commands.chronicle.save_figure", keep)
    path = tmp_path / "pictures" / "loss.png"
    assert chronicle.main([str(run), "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    loss, rate = drawn[0].axes
    training, evaluation = loss.lines
    iterations = np.asarray(training.get_xdata())
    # No line crosses 31 to 40, which were skipped, and 52, which was dropped.
    assert np.flatnonzero(np.isnan(iterations)).tolist() == [30, 42]
    trained = [*range(1, 31), *range(41, 52), *range(53, 61)]
    assert iterations[~np.isnan(iterations)].tolist() == trained
    assert evaluation.get_label() == "held-out"
    assert len(rate.lines) == 1


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_page_in_a_browser(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", "|"))
    write_page(tmp_path, run)
    with start_browser(tmp_path / "profile") as browser:
        browser.open(tmp_path / "report.html")
        count = browser.evaluate
        assert count("document.title").startswith("Report of <|script>")
        # No header breaks, and nothing is wider than the window.
        assert count("[...document.querySelectorAll('th')].every(e => e.clientHeight < 40)")
        assert count("document.body.scrollWidth <= window.innerWidth")

        # One line through all panels, and a value in each of them.
        box = "document.querySelector('figure[data-panel] svg')"
        count(f"{box}.scrollIntoView({{block: 'center'}})")
        position = "b => [b.left + 0.463 * b.width, b.top + 50]"
        x, y = count(f"({position})({box}.getBoundingClientRect())")
        browser.move_mouse(x, y)
        lines = count("[...document.querySelectorAll('.cursor')].map(e => e.getAttribute('x1'))")
        assert len(lines) == 7
        assert len(set(lines)) == 1
        values = count("[...document.querySelectorAll('.values')].map(e => e.textContent)")
        assert values[0].startswith("loss 2.1")
        assert sum(text != "" for text in values) == 6
        assert count("document.getElementById('readout').textContent").startswith("iteration 25")

        # Equal steps get shorter on the logarithmic scale, and every point stays.
        ticks = f"[...{box}.querySelectorAll('.grid .y')].map(e => +e.getAttribute('y'))"
        points = f"{box}.querySelector('.kept').getAttribute('d').match(/[ML]/g).length"
        for is_log in (False, True):
            four, six, eight = count(ticks)
            assert (six - eight < 0.9 * (four - six)) == is_log
            assert count(points) == 49
            count("document.getElementById('log').click()")

        # A filter hides the rows of an event and its marks in the charts.
        hidden = "document.querySelectorAll('tr[data-kind=rollback][hidden]').length"
        marks = "document.querySelectorAll('circle.rollback[hidden]').length"
        assert (count(hidden), count(marks)) == (0, 0)
        count("document.querySelector('.kind[value=rollback]').click()")
        assert (count(hidden), count(marks)) == (4, 2)
        shown = "[...document.querySelectorAll('.settings tr:not([hidden])')].map(e => e.innerText)"
        count(
            "(e => {e.value = 'SEED'; e.dispatchEvent(new Event('input'))})"
            "(document.querySelector('.search'))"
        )
        assert [row.split() for row in count(shown)] == [["--seed", "7"]]

        # Hours are another axis: the time between two launches has no line.
        count(
            "(e => {e.value = 'hours'; e.dispatchEvent(new Event('change'))})"
            "(document.getElementById('axis'))"
        )
        assert count("JSON.parse(document.body.dataset.view).axis") == "hours"
        assert count("document.title").startswith("Report of <|script>")
        names = {each["method"] for each in browser.events}
        assert not names & {"Log.entryAdded", "Runtime.exceptionThrown"}
        urls = [
            each["params"]["request"]["url"]
            for each in browser.events
            if each["method"] == "Network.requestWillBeSent"
        ]
        assert all(url.startswith("file:") for url in urls)
