"""The choice of tests by `bash tests/run.sh --changed`, and the record of their times."""

import importlib
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from equivalence.layouts import SHORT
from equivalence.test_layouts import RESUMED
from suites import find_unchanged

ROOT = Path(__file__).resolve().parents[1]
CHANGED = Path("megatron/engine/part.py")
NEAR = "tests/engine/test_near.py"
UNMEASURED = "tests/data/test_unmeasured.py"
FAR = "tests/engine/test_far.py"
ELSEWHERE = "tests/data/test_far.py"


@pytest.fixture
def nearest(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the script that chooses the tests."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    monkeypatch.chdir(ROOT)
    import nearest_tests

    return nearest_tests


@pytest.fixture
def selection(nearest: Any) -> Any:
    """Return what is chosen for a module with 48 s for its tests."""
    caller = Path("megatron/run/caller.py")
    importers = {
        CHANGED: {Path(NEAR), Path(UNMEASURED), caller},
        caller: {Path(FAR), Path(ELSEWHERE)},
    }
    record = {
        nearest.ALWAYS: 2.0,
        **dict.fromkeys(nearest.RANK_TESTS, 5.0),
        NEAR: 3.0,
        f"{NEAR}::test_slow[a b]": 4.0,
        f"{NEAR}::test_slow[c]": 20.0,
        FAR: 30.0,
        f"{FAR}::test_slow": 2.0,
        ELSEWHERE: 0.1,
    }
    return nearest.select(CHANGED, importers, record)


def test_fast_tests_of_near_files_are_chosen_first(nearest: Any, selection: Any) -> None:
    near = {NEAR, f"{NEAR}::test_slow[a b]", UNMEASURED}
    assert selection.chosen == {nearest.ALWAYS, *nearest.RANK_TESTS, *near}
    assert selection.left_out == {f"{NEAR}::test_slow[c]", FAR}
    # Each file takes 0.1 s more, and the time of one file is unknown.
    assert selection.seconds == pytest.approx(10 + 2.1 + 3.1 + 20.1 + 4)


def test_arguments_and_report(nearest: Any, selection: Any) -> None:
    files = {nearest.ALWAYS, *nearest.RANK_TESTS, NEAR, UNMEASURED}
    assert nearest.list_arguments(selection) == [
        *sorted(files),
        f"--deselect={NEAR}::test_slow[c]",
    ]
    assert nearest.describe(selection).splitlines()[1:] == [
        "2 files have further tests. Run all tests of these files with:",
        f"bash tests/run.sh {FAR} {NEAR}",
    ]


def test_a_changed_test_file_runs_completely(nearest: Any) -> None:
    layouts = "tests/equivalence/test_layouts.py"
    slow = f"{layouts}::test_the_curve_is_the_golden_one"
    record = {layouts: 0.0, slow: 100.0}
    helper = Path("tests/equivalence/layouts.py")
    assert f"--deselect={slow}" in nearest.list_arguments(nearest.select_all([helper], record))
    both = nearest.list_arguments(nearest.select_all([helper, Path(layouts)], record))
    assert layouts in both
    assert f"--deselect={slow}" not in both


def test_each_module_of_the_core_keeps_the_limit(nearest: Any) -> None:
    importers = nearest.read_importers()
    record = nearest.read_record()
    for file in nearest.list_core():
        selection = nearest.select(file, importers, record)
        assert nearest.START_SECONDS + selection.seconds <= nearest.LIMIT_SECONDS, file


def test_the_tests_with_ranks_exist(nearest: Any) -> None:
    ids = {str(layout) for layout in SHORT} | {f"{a}--{b}" for a, b in RESUMED}
    assert {name.split("[")[1].rstrip("]") for name in nearest.RANK_TESTS} <= ids


def test_a_measured_file_replaces_its_rows(nearest: Any) -> None:
    from measure_tests import merge

    old = {"tests/test_plan.py": 1.0, "tests/test_apex.py": 1.0, "tests/test_gone.py": 1.0}
    old["tests/test_plan.py::test_gone"] = 9.0
    new = {"tests/test_plan.py::test_a": 0.25, "tests/test_plan.py::test_b": 2.0}
    assert merge(old, new) == {
        "tests/test_apex.py": 1.0,
        "tests/test_plan.py": 0.25,
        "tests/test_plan.py::test_b": 2.0,
    }


def test_files_without_a_time_or_with_twice_the_time_are_reported(nearest: Any) -> None:
    from report_times import compare

    record = {"tests/a.py": 4.0, "tests/a.py::test_a": 2.0, "tests/b.py": 1.0, "tests/c.py": 20.0}
    elapsed = {"tests/a.py": 13.0, "tests/b.py": 9.0, "tests/c.py": 30.0, "tests/d.py": 0.1}
    assert compare(elapsed, record) == (
        ["tests/d.py"],
        ["tests/a.py: 13 s, 6 s are recorded"],
    )


@pytest.mark.parametrize(
    ("changed", "left_out"),
    [
        ([], ["marked"]),
        (["docs/a.md", "examples"], ["marked"]),
        (["examples/hackathon/train.sh"], []),
        (["megatron/plan/resolve.py", "setup.py"], []),
    ],
)
def test_a_marked_test_is_left_out_unless_one_of_its_files_has_changed(
    changed: list[str], left_out: list[str]
) -> None:
    mark = pytest.mark.when_changed("examples/*", "setup.py").mark
    marks = {"marked": mark, "plain": None}
    items: Any = [
        SimpleNamespace(name=name, get_closest_marker=lambda _, found=found: found)
        for name, found in marks.items()
    ]
    assert [item.name for item in find_unchanged(items, changed)] == left_out


@pytest.mark.parametrize("name", ["test_sandbox", "test_limits"])
def test_a_test_of_the_shell_runs_if_a_module_that_it_imports_has_changed(
    name: str, nearest: Any
) -> None:
    module = importlib.import_module(f"translators.{name}")
    marks = module.pytestmark if isinstance(module.pytestmark, list) else [module.pytestmark]
    (patterns,) = (mark.args for mark in marks if mark.name == "when_changed")
    imported: set[Path] = set()
    found = {Path(f"tests/translators/{name}.py")}
    while found:
        imported |= found
        users = nearest.read_importers().items()
        found = {file for file, importers in users if importers & found} - imported
    assert len(imported) > 5
    for file in imported:
        assert any(fnmatch(str(file), pattern) for pattern in patterns), file
