"""Sequence lengths of curriculum learning."""

import dataclasses
import math

import pytest

from megatron.base.errors import ConfigError
from megatron.schedule.curriculum import FOREVER, Curriculum

LINEAR = Curriculum(
    "fixed_linear",
    min_difficulty=64,
    max_difficulty=2048,
    total_curriculum_step=36_000,
    difficulty_step=8,
)


def test_linear_growth_in_multiples_of_the_step():
    steps = (1, 145, 146, 18_000, 35_999, 36_000, 10**6)
    assert [LINEAR.get_seq_length(step) for step in steps] == [64, 64, 72, 1056, 2040, 2048, 2048]
    lengths = [LINEAR.get_seq_length(step) for step in range(1, 36_001)]
    assert lengths == sorted(lengths)
    assert lengths == [64 + 1984 * step // 36_000 // 8 * 8 for step in range(1, 36_001)]


def test_length_is_at_least_the_first_multiple_above_the_minimum():
    schedule = dataclasses.replace(LINEAR, min_difficulty=60)
    assert schedule.get_seq_length(1) == 64
    assert dataclasses.replace(LINEAR, max_difficulty=2044).get_seq_length(36_000) == 2040
    assert dataclasses.replace(LINEAR, max_difficulty=2044).get_seq_length(40_000) == 2044
    # The maximum has priority over the rounding.
    short = Curriculum(
        "fixed_linear",
        min_difficulty=3,
        max_difficulty=5,
        total_curriculum_step=10,
        difficulty_step=8,
    )
    assert short.get_seq_length(1) == 5


def test_root_growth():
    schedule = dataclasses.replace(LINEAR, style="fixed_root", root_degree=2)
    for step in (1, 100, 9_000, 36_000):
        length = math.floor(64 + 1984 * math.sqrt(step / 36_000))
        assert schedule.get_seq_length(step) == length - length % 8
    # A quarter of the iterations gives half of the growth.
    assert schedule.get_seq_length(9_000) == 1056
    assert schedule.get_seq_length(36_000) == 2048


def test_discrete_growth():
    schedule = Curriculum(
        "fixed_discrete", 64, 2048, difficulties=(64, 512, 2048), max_steps=(10, 20)
    )
    lengths = [schedule.get_seq_length(step) for step in (1, 10, 11, 20, 21, 10**6)]
    assert lengths == [64, 64, 512, 512, 2048, 2048]


@pytest.mark.parametrize(
    "schedule",
    [
        LINEAR,
        dataclasses.replace(
            LINEAR, min_difficulty=60, max_difficulty=2044, total_curriculum_step=700
        ),
        dataclasses.replace(LINEAR, style="fixed_root", root_degree=3, total_curriculum_step=5000),
        dataclasses.replace(LINEAR, min_difficulty=2048),
        Curriculum("fixed_discrete", 8, 64, difficulties=(8, 64, 64, 16), max_steps=(10, 20, 900)),
        Curriculum("fixed_discrete", 8, 8, difficulties=(8,)),
    ],
    ids=str,
)
def test_stages_begin_where_the_length_changes(schedule: Curriculum):
    for first, last in ((1, 5000), (700, 705), (901, 901), (5, 4)):
        lengths = [schedule.get_seq_length(step) for step in range(first, last + 1)]
        changes = [(first + i, n) for i, n in enumerate(lengths) if i == 0 or n != lengths[i - 1]]
        assert list(schedule.iterate_stages(first, last)) == changes


def test_stages_of_an_endless_run_are_finite():
    assert list(LINEAR.iterate_stages(35_900, FOREVER))[-1] == (36_000, 2048)
    assert len(list(LINEAR.iterate_stages(1, FOREVER))) == 249  # 64, 72, ... 2048


def test_iteration_that_reaches_a_number_of_tokens():
    schedule = dataclasses.replace(LINEAR, total_curriculum_step=100)
    for first in (1, 40, 200):
        tokens = 0
        for step in range(first, first + 150):
            before = tokens
            tokens += 4 * schedule.get_seq_length(step)
            assert schedule.find_iteration_reaching(tokens, 4, first, 400) == step
            assert schedule.find_iteration_reaching(before + 1, 4, first, 400) == step
            assert schedule.find_iteration_reaching(tokens + 1, 4, first, step) is None


def test_schedule_is_described_in_words():
    assert str(LINEAR) == "fixed_linear from 64 to 2048 tokens over 36000 iterations in steps of 8"
    assert str(dataclasses.replace(LINEAR, style="fixed_root", root_degree=2)).startswith(
        "fixed_root (root 2) from 64"
    )
    discrete = Curriculum("fixed_discrete", 8, 64, difficulties=(8, 64), max_steps=(10,))
    assert str(discrete) == "fixed_discrete: 8 up to iteration 10, 64 from then on"


def test_lengths_that_are_slow_on_tensor_cores_are_warnings():
    assert LINEAR.list_warnings() == []
    warnings = dataclasses.replace(LINEAR, min_difficulty=60, difficulty_step=4).list_warnings()
    assert len(warnings) == 2
    assert "min_difficulty 60 is not a multiple of 8" in warnings[0]
    discrete = Curriculum("fixed_discrete", 8, 16, difficulties=(12, 16), max_steps=(5,))
    assert "difficulty 12" in discrete.list_warnings()[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"style": "fixed_cubic"},
            "'fixed_cubic' is unknown; use fixed_linear, fixed_root or fixed_discrete",
        ),
        (
            {"min_difficulty": 4096},
            "min_difficulty 4096 must be at least 1 and at most max_difficulty 2048",
        ),
        ({"min_difficulty": 0}, "min_difficulty 0"),
        (
            {"total_curriculum_step": None},
            "fixed_linear needs total_curriculum_step and difficulty_step",
        ),
        ({"difficulty_step": 0}, "given difficulty_step 0"),
        ({"style": "fixed_root"}, "given root_degree None"),
        ({"style": "fixed_discrete"}, "given 0 difficulties"),
        (
            {"style": "fixed_discrete", "difficulties": (64, 128, 256), "max_steps": (9, 5)},
            "rising list",
        ),
        (
            {"style": "fixed_discrete", "difficulties": (64, 4096), "max_steps": (9,)},
            "must be between min_difficulty",
        ),
    ],
)
def test_invalid_schedules_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LINEAR, **changes)
