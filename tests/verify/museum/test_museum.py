"""The museum: each public error is found by the method that was written down before it was run.

Errors that a reduced copy or the comparison of replicas finds are run with the other mutations
(`test_layout_verification.py`). This file runs the others, and checks the table and its page.
UPDATE_GOLDEN=1 writes the tables of the page again.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.other_trainers import (
    NANOGPT_CONFIG,
    build_nanogpt,
    build_nanogpt_optimizer,
    fill_states,
    save_nanogpt,
)
from verify.museum.errors import ERRORS, KnownError, Method
from verify.museum.page import BEGIN, END, format_tables
from verify.mutation import INVARIANTS, ITERATIONS, MODEL, REPLAY
from verify.mutations import MUTATIONS
from verify.test_recorded_step import record
from verify.typed_runs import check_planted

from megatron.commands import verify
from megatron.commands.verify import VerifyArguments, resolve_command
from megatron.extras.interop.commands import convert_checkpoint
from megatron.extras.planner.dry_run.process import call_in_pool, find_compiler, open_pool

PAGE = Path(__file__).resolve().parents[3] / "docs" / "known_errors.md"
PLANTED = {mutation.name: mutation for mutation in MUTATIONS}


def choose(method: Method) -> list[KnownError]:
    return [error for error in ERRORS if error.method == method]


def test_the_errors_have_a_method_and_a_source() -> None:
    assert len(ERRORS) == 50
    assert len({error.mutation for error in ERRORS}) == 50
    for error in ERRORS:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|:[\w./-]+\.md)", error.source)
        assert error.wrong
        assert error.cost


@pytest.mark.parametrize("error", choose(Method.COPY), ids=lambda error: error.mutation)
def test_a_copy_finds_the_error_by_the_comparison_of_the_table(error: KnownError) -> None:
    """`test_a_known_error_is_found` runs it, and requires the comparison of the mutation."""
    assert (PLANTED[error.mutation].caught_by == error.expected) == (not error.missed)


@pytest.mark.parametrize(
    "error", choose(Method.INVARIANTS) + choose(Method.REPLAY), ids=lambda error: error.mutation
)
def test_a_check_of_the_run_finds_the_error(error: KnownError) -> None:
    """`test_a_known_error_is_found` runs it, and requires the error of this check."""
    key = {Method.INVARIANTS: INVARIANTS, Method.REPLAY: REPLAY}[error.method]
    assert PLANTED[error.mutation].caught_by == key


@pytest.mark.parametrize("error", choose(Method.RULE), ids=lambda error: error.mutation)
def test_a_rule_names_the_error(error: KnownError) -> None:
    """The sizes of the 104B model, with the inner width of the 13B model."""
    flags = "--hidden-size 16384 --num-attention-heads 32 --num-layers 32 --lr 1e-4 --mock-data"
    sizes = f"{MODEL} {ITERATIONS} {flags}".replace("--data-path data/absent", "")
    arguments = VerifyArguments(world_size=8)
    for width, is_named in ((20480, True), (65536, False)):
        words = f"{sizes} --ffn-hidden-size {width}".split()
        messages = resolve_command(arguments, words)[0].warnings
        assert any(error.expected in message for message in messages) == is_named


@pytest.mark.parametrize("error", choose(Method.COMPARE), ids=lambda error: error.mutation)
@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_recorded_step_shows_the_error(
    error: KnownError, is_wrong: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The other trainer adds each bias of a row-parallel layer twice, as two ranks would."""
    torch.manual_seed(5)
    config = NANOGPT_CONFIG | {"bias": True}
    model: Any = build_nanogpt(config, 64)
    optimizer = build_nanogpt_optimizer(model, config)
    biases = [
        parameter
        for name, parameter in model.named_parameters()
        if name.endswith(("attn.c_proj.bias", "mlp.c_proj.bias"))
    ]
    assert len(biases) == 4
    with torch.no_grad():
        for bias in biases:
            bias.normal_(std=0.1)
    fill_states(model, optimizer, 1)
    save_nanogpt(tmp_path / "ckpt.pt", model, optimizer, config, 1)
    out = tmp_path / "imported"
    command = ["from-nanogpt", "--load", str(tmp_path / "ckpt.pt"), "--out", str(out)]
    assert convert_checkpoint.main(command) == 0
    model.zero_grad()
    if is_wrong:
        with torch.no_grad():
            for bias in biases:
                bias.mul_(2)
    step = record(tmp_path / "step.json", model, model, 60)
    assert verify.main(["--compare", str(step), "--weights", str(out)]) == int(is_wrong)
    assert (f"order of a step: {error.expected}" in capfd.readouterr().out) == is_wrong


@pytest.mark.parametrize("error", choose(Method.TYPES), ids=lambda error: error.mutation)
@pytest.mark.full
def test_types_name_the_error(error: KnownError) -> None:
    pytest.importorskip("spmd_types")
    if find_compiler() is None:
        pytest.skip("the fake GPU needs a C++ compiler, and there is none")
    with open_pool(1) as pool:
        problems = call_in_pool(pool, check_planted, error.mutation)
    assert problems
    assert any(error.expected in problem for problem in problems), problems[:5]


def test_the_page_has_the_errors_of_the_table() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(before + format_tables() + after)
    assert PAGE.read_text() == before + format_tables() + after


def test_the_page_counts_the_errors_that_were_found() -> None:
    missed = sum(bool(error.missed) for error in ERRORS)
    text = PAGE.read_text().replace("\n", " ")
    assert f"found {50 - missed} of 50 errors by the method that was written" in text


def test_the_page_of_the_verification_counts_all_errors() -> None:
    text = (PAGE.parent / "verify.md").read_text()
    assert f"puts {len(MUTATIONS)} known errors into the package" in text
    norms = sum(mutation.caught_by == "gradient norm" for mutation in MUTATIONS)
    losses = sum(mutation.caught_by == "loss" for mutation in MUTATIONS)
    assert f"the gradient norm ({norms}) or the loss ({losses})" in text
