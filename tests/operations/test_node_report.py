"""Which hosts are bad by what their ranks told."""

import json
from pathlib import Path

import pytest

from megatron.operations import attempts
from megatron.operations.node_report import (
    NodeLimits,
    NodeReport,
    find_bad_hosts,
    parse_tasks_per_node,
    read,
    write,
)

LIMITS = NodeLimits(seconds=30)


def good(host: str, rank: int, tflops: float = 10.0) -> NodeReport:
    return NodeReport(host, rank, tflops, 300.0, 20.0)


def test_good_hosts_are_not_accused() -> None:
    reports = [good("n1", 0), good("n1", 1), good("n2", 2, 8.0), good("n2", 3)]
    assert find_bad_hosts(reports, {"n1": 2, "n2": 2}, LIMITS) == {}


def test_a_rank_that_did_not_answer() -> None:
    bad = find_bad_hosts([good("n1", 0), good("n1", 1), good("n2", 2)], {"n1": 2, "n2": 2}, LIMITS)
    assert bad == {"n2": "1 of 2 ranks did not answer within 30 s"}


@pytest.mark.parametrize("part", ["memory", "product", "disk"])
def test_a_rank_that_hung_in_a_part_of_its_own(part: str) -> None:
    reports = [NodeReport("n1", 0, 10.0, doing="all-reduce"), NodeReport("n2", 1, doing=part)]
    assert find_bad_hosts(reports, {"n1": 1, "n2": 1}, LIMITS) == {
        "n2": f"rank 1: hung in the check of its {part} for 30 s"
    }


def test_who_waits_in_the_all_reduce_or_failed_there_is_not_accused() -> None:
    reports = [
        NodeReport("n1", 0, 10.0, doing="all-reduce"),
        NodeReport("n2", 1, 10.0, all_reduce_failure="timed out"),
    ]
    assert find_bad_hosts(reports, {"n1": 1, "n2": 1}, LIMITS) == {}


def test_a_slow_rank() -> None:
    reports = [good("n1", 0), good("n2", 1, 4.0), good("n3", 2)]
    assert find_bad_hosts(reports, {"n1": 1, "n2": 1, "n3": 1}, LIMITS) == {
        "n2": "rank 1: 4 TFLOPS, where the median rank has 10"
    }
    assert find_bad_hosts(reports, {"n1": 1, "n2": 1, "n3": 1}, NodeLimits(slower_than=0)) == {}


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
def test_tasks_of_nodes(text: str, nodes: int, counts: list[int]) -> None:
    assert parse_tasks_per_node(text, nodes) == counts


def test_what_is_written_is_read(tmp_path: Path) -> None:
    reports = [NodeReport("n1", 0, failures=("disk: full", "memory: 3 words")), good("n2", 1)]
    for report in reversed(reports):
        write(tmp_path, report)
    assert read(tmp_path) == reports


def test_a_line_that_was_cut_off_swallows_no_other(tmp_path: Path) -> None:
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
