"""Bad hosts are found from the reports of their ranks, and failed starts are counted."""

import json
from pathlib import Path

import pytest

from megatron.extras.operations.slurm import attempts
from megatron.extras.operations.slurm.node_report import (
    NodeLimits,
    NodeReport,
    find_bad_hosts,
    parse_tasks_per_node,
    read,
    write,
)

LIMITS = NodeLimits(seconds=30)


def good(host: str, rank: int, tflops: float = 10.0) -> NodeReport:
    return NodeReport(
        host=host,
        rank=rank,
        tflops=tflops,
        disk_mb_per_second=300.0,
        all_reduce_gb_per_second=20.0,
    )


def test_good_hosts_are_not_bad() -> None:
    reports = [good("n1", 0), good("n1", 1), good("n2", 2, 8.0), good("n2", 3)]
    assert find_bad_hosts(reports, {"n1": 2, "n2": 2}, LIMITS) == {}


def test_host_of_a_rank_that_did_not_answer_is_bad() -> None:
    bad = find_bad_hosts([good("n1", 0), good("n1", 1), good("n2", 2)], {"n1": 2, "n2": 2}, LIMITS)
    assert set(bad) == {"n2"}
    assert "1 of 2 ranks did not answer within 30 s" in bad["n2"]


def test_hosts_are_matched_by_their_short_names() -> None:
    """A rank that does not know Slurm's name of its host reports the system's name."""
    full = [good("n1.site.org", 0), NodeReport("n2.site.org", 1, failures=("disk: full",))]
    bad = find_bad_hosts(full, {"n1": 1, "n2": 1}, LIMITS)
    assert bad == {"n2": "rank 1: disk: full"}
    short = [good("n1", 0), NodeReport("n2", 1, failures=("disk: full",))]
    assert set(find_bad_hosts(short, {"n1.site.org": 1, "n2.site.org": 1}, LIMITS)) == {
        "n2.site.org"
    }


def test_hosts_with_the_same_short_name_are_different_hosts() -> None:
    reports = [good("n1.a.org", 0), NodeReport("n1.b.org", 1, failures=("disk: full",))]
    assert set(find_bad_hosts(reports, {"n1.a.org": 1, "n1.b.org": 1}, LIMITS)) == {"n1.b.org"}


@pytest.mark.parametrize("part", ["memory", "product", "disk"])
def test_host_of_a_rank_that_hung_in_its_own_check_is_bad(part: str) -> None:
    reports = [NodeReport("n1", 0, 10.0, doing="all-reduce"), NodeReport("n2", 1, doing=part)]
    bad = find_bad_hosts(reports, {"n1": 1, "n2": 1}, LIMITS)
    assert set(bad) == {"n2"}
    assert f"rank 1: hung in the check of its {part} for 30 s" in bad["n2"]


def test_failed_all_reduce_makes_no_host_bad() -> None:
    reports = [
        NodeReport("n1", 0, 10.0, doing="all-reduce"),
        NodeReport("n2", 1, 10.0, all_reduce_failure="timed out"),
    ]
    assert find_bad_hosts(reports, {"n1": 1, "n2": 1}, LIMITS) == {}


def test_host_of_a_slow_rank_is_bad() -> None:
    reports = [good("n1", 0), good("n2", 1, 4.0), good("n3", 2)]
    tasks = {"n1": 1, "n2": 1, "n3": 1}
    bad = find_bad_hosts(reports, tasks, LIMITS)
    assert set(bad) == {"n2"}
    assert "rank 1: 4 TFLOPS, where the median rank has 10" in bad["n2"]
    assert find_bad_hosts(reports, tasks, NodeLimits(slower_than=0)) == {}


@pytest.mark.parametrize(
    ("text", "nodes", "counts"),
    [
        ("4(x2),3", 3, [4, 4, 3]),
        ("2", 1, [2]),
        ("8(x128)", 128, [8] * 128),
        ("", 2, [1, 1]),
        ("4(x3)", 2, [1, 1]),
    ],
)
def test_tasks_per_node_are_parsed(text: str, nodes: int, counts: list[int]) -> None:
    assert parse_tasks_per_node(text, nodes) == counts


def test_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    reports = [NodeReport("n1", 0, failures=("disk: full", "memory: 3 words")), good("n2", 1)]
    for report in reversed(reports):
        write(tmp_path, report)
    assert read(tmp_path) == reports


def test_incomplete_line_of_an_attempt_hides_no_other(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    first = attempts.begin(tmp_path, environment)
    with open(tmp_path / attempts.FILE, "a") as file:
        file.write('{"ended": {"beg')
    second = attempts.begin(tmp_path, environment)
    attempts.end(tmp_path, second, "crashed")
    in_a_row = attempts.list_failed_in_a_row(tmp_path, "7", frozenset({"left in order"}))
    assert [past.attempt for past in in_a_row] == [first, second]
    assert [past.outcome for past in in_a_row] == [None, "crashed"]
    third = attempts.begin(tmp_path, environment)
    attempts.end(tmp_path, third, "left in order")
    assert attempts.list_failed_in_a_row(tmp_path, "7", frozenset({"left in order"})) == []
    assert attempts.list_failed_in_a_row(tmp_path, "8", frozenset({"left in order"})) == []
    assert all(
        json.loads(line)
        for line in (tmp_path / attempts.FILE).read_text().splitlines()
        if line != '{"ended": {"beg'
    )
