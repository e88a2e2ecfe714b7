"""Whoever reaches the port of the rendezvous store can write any value."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch.distributed as dist

from megatron.parallel.rank_progress import RankState
from megatron.parallel.store_values import (
    make_call_name,
    parse_answer,
    parse_state,
    read_call_name,
    read_text,
)

STATE = asdict(
    RankState(
        at="run/loop.py:102 train_iteration",
        waits=True,
        phase="training iteration 5",
        sequence=7,
        collectives={"0": [3, "gloo:all_reduce [4]"]},
        recent={"0": {"2": "gloo:all_reduce [4]", "3": "gloo:all_reduce [4]"}},
        collective="gloo:all_reduce [4], number 3 of group 0",
    )
)
WRONG: list[tuple[str, Any]] = [
    ("at", 3),
    ("waits", 1),
    ("phase", None),
    ("sequence", True),
    ("sequence", -1),
    ("sequence", 1.5),
    ("collectives", []),
    ("collectives", {"0": ["3", "all_reduce"]}),
    ("collectives", {"0": [3]}),
    ("recent", {"0": {"two": "all_reduce"}}),
    ("recent", {"0": {"9" * 5000: "all_reduce"}}),
    ("recent", {"0": {"2": {}}}),
    ("collective", ["all_reduce"]),
    ("unknown", ""),
]


@pytest.mark.parametrize("answer", [STATE, {"at": "a.py:1 f"}, {"left": "it finished"}])
def test_answer_of_a_rank_is_read(answer: dict[str, Any]) -> None:
    assert parse_answer(json.dumps(answer).encode()) == answer
    is_state = answer is STATE
    assert (parse_state(json.dumps(answer).encode()) == RankState(**STATE)) == is_state


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_field_is_refused(name: str, value: Any) -> None:
    assert parse_answer(json.dumps({**STATE, name: value}).encode()) is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"null", b"[]", b"{}", b'{"left": 1}', b"[" * 100_000, b"9" * 10_000]
)
def test_other_value_is_refused(data: bytes) -> None:
    assert parse_answer(data) is None
    assert parse_state(data) is None


def test_text_is_printable_and_short() -> None:
    answer = parse_answer(json.dumps({"left": "a\x1b[2J\r\nALERT: b" + 10_000 * "c"}).encode())
    assert answer is not None
    assert answer["left"].startswith("a\\x1b[2J  ALERT: bccc")
    assert len(answer["left"]) < 2100
    store = dist.HashStore()
    store.set("verdict", "two\nlines\r\x9b" + 100_000 * "c")
    verdict = read_text(store, "verdict")
    assert verdict.startswith("two\nlines \\x9bccc")
    assert len(verdict) < 20_100


def test_only_a_name_that_a_rank_makes_is_a_name() -> None:
    store = dist.HashStore()
    made = make_call_name(12)
    for name in ("1", "../../x", "/tmp/x", f"{made}/..", f"{made}\n", made.replace("0", "٠"), ""):
        store.set("called", name)
        assert read_call_name(store, "called") is None
    store.set("called", made)
    assert read_call_name(store, "called") == made
