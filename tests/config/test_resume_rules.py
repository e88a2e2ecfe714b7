"""Rules between a checkpoint and its run: the files of the tokenizer and the skipped ranges."""

from pathlib import Path

import pytest
from config.minimal import TRAINABLE

from megatron.config.data import TokenizerConfig
from megatron.extras.interop.translators.translator import load_config
from megatron.plan.resolve import resolve
from megatron.plan.rules.finding import Finding, ResumeContext, TokenizerContext, error, warning
from megatron.plan.rules.resume import (
    check_curriculum,
    check_optimizer,
    check_tokenizer,
    warn_about_new_states,
    warn_about_skip_ranges,
    warn_about_trained_range,
)
from megatron.schedule.skip import SkipRange
from megatron.tokenizer import vocabulary
from megatron.tokenizer.vocabulary import compute_tokenizer_digests

VOCAB = "--vocab-file"
MERGES = "--merge-file"


@pytest.fixture
def tokenizer(tmp_path: Path) -> TokenizerConfig:
    vocab = tmp_path / "vocab.json"
    merges = tmp_path / "merges.txt"
    vocab.write_text("{}")
    merges.write_text("a b")
    return TokenizerConfig(vocab_file=str(vocab), merge_file=str(merges))


def compare(tokenizer: TokenizerConfig, saved: dict[str, str], iteration: int = 5) -> list[Finding]:
    return list(check_tokenizer(TokenizerContext(tokenizer, iteration, saved)))


def test_changed_file_of_the_tokenizer_is_named_with_both_digests(
    tokenizer: TokenizerConfig,
) -> None:
    saved = compute_tokenizer_digests(tokenizer)
    assert set(saved) == {VOCAB, MERGES}
    assert compare(tokenizer, saved) == []
    assert tokenizer.merge_file is not None
    Path(tokenizer.merge_file).write_text("b a")
    now = compute_tokenizer_digests(tokenizer)
    (found,) = compare(tokenizer, saved)
    assert found.level == "error"
    line = f"--merge-file {tokenizer.merge_file} is {now[MERGES]}, the checkpoint's is"
    assert f"\n  {line} {saved[MERGES]}\n" in found.text
    assert VOCAB not in found.text
    assert "Give the original files, under any path, or start a new run" in found.text
    # A start from scratch may choose its tokenizer.
    assert compare(tokenizer, saved, iteration=0) == []


def test_tokenizer_with_other_parts_is_another_one(tokenizer: TokenizerConfig) -> None:
    (found,) = compare(tokenizer, {"tokenizer.json": "0" * 32})
    assert found.level == "error"
    assert f"it consists of {VOCAB}, {MERGES}, the checkpoint's of tokenizer.json" in found.text


def test_files_that_cannot_be_compared_give_one_warning(tokenizer: TokenizerConfig) -> None:
    saved = compute_tokenizer_digests(tokenizer)
    assert compare(TokenizerConfig(vocab_file=tokenizer.vocab_file), saved) == [
        warning("--merge-file: not compared with the checkpoint's, because it is not given here")
    ]
    assert compare(TokenizerConfig(), saved) == [
        warning(
            "no file of the tokenizer is given or found, so it was not compared with the "
            "checkpoint's"
        )
    ]
    assert compare(tokenizer, {}) == [
        warning(
            "the checkpoint has no digests of the tokenizer's files, so they were not compared "
            "with it"
        )
    ]
    assert compare(TokenizerConfig(), {}) == []


def test_unreadable_file_of_the_tokenizer_is_an_error(
    tokenizer: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, limit: int) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(vocabulary, "load_bytes", fail)
    assert compare(tokenizer, {VOCAB: "0" * 32}) == [
        error(
            "a file of the tokenizer cannot be read: [Errno 5] Input/output error: "
            f"'{tokenizer.vocab_file}'"
        )
    ]


def resume(
    flags: str,
    iteration: int,
    saved_ranges: tuple[SkipRange, ...] = (),
    saved_flags: str = "",
    *,
    has_states: bool = True,
) -> ResumeContext:
    """Return the context of a run that continues from a checkpoint.

    The files of the tokenizer and the schedule of the learning rate are left out.
    """
    words = [*TRAINABLE, "--mock-data", "--vocab-size", "100", "--global-batch-size", "2"]
    given = load_config([*words, *flags.split()]).config
    saved = load_config([*words, *saved_flags.split()]).config
    return ResumeContext(
        given.tokenizer,
        iteration,
        {},
        given,
        resolve(given, 1),
        saved=saved,
        has_states=has_states,
        saved_schedule=None,
        saved_ranges=saved_ranges,
    )


@pytest.mark.parametrize(
    ("iteration", "saved", "trained"),
    [
        # The run stopped before the range.
        (3, (), None),
        (4, (), "iterations 4 to 4 of the range 4-8"),
        (6, (), "iterations 4 to 6 of the range 4-8"),
        # The checkpoint's run skipped 5 and 6 itself.
        (6, ((5, 6),), "iterations 4 to 4 of the range 4-8"),
        (6, ((4, 8),), None),
        # No iteration of the range is left.
        (8, (), None),
    ],
)
def test_trained_part_of_a_skipped_range_is_named(
    iteration: int, saved: tuple[SkipRange, ...], trained: str | None
) -> None:
    context = resume("--skip-train-iteration-range 4-8", iteration, saved)
    found = list(warn_about_trained_range(context))
    if trained is None:
        assert found == []
        return
    assert found == [
        warning(
            f"{trained} were trained by an earlier launch and stay in the weights. To undo them, "
            "roll back to a checkpoint before iteration 4"
        )
    ]


@pytest.mark.parametrize(
    ("flags", "iteration", "text"),
    [
        (
            "--skip-train-iteration-range 7-8",
            2,
            "--skip-train-iteration-range replaces the checkpoint's 4-6 9-9",
        ),
        ("", 5, "the checkpoint's --skip-train-iteration-range 4-6 9-9 still applies"),
        ("", 6, "the checkpoint's --skip-train-iteration-range 9-9 still applies"),
        ("", 9, None),
        ("--skip-train-iteration-range 4-6 9-9", 2, None),
    ],
)
def test_ranges_of_the_checkpoint_that_lie_ahead_are_named(
    flags: str, iteration: int, text: str | None
) -> None:
    found = list(warn_about_skip_ranges(resume(flags, iteration, ((4, 6), (9, 9)))))
    assert found == ([] if text is None else [warning(text)])


def test_states_of_another_optimizer_are_refused_or_left_out_silently() -> None:
    other = resume("--optimizer muon", 5)
    (found,) = check_optimizer(other)
    assert found.level == "error"
    assert "--optimizer muon: the checkpoint of iteration 5 has the states of adam" in found.text
    assert "give --optimizer adam, or --no-load-optim" in found.text
    assert list(check_optimizer(resume("--optimizer muon --no-load-optim", 5))) == []
    assert list(check_optimizer(resume("--optimizer muon", 5, has_states=False))) == []
    # Only states that would have fitted are missed.
    assert list(warn_about_new_states(resume("--optimizer muon --no-load-optim", 5))) == []
    (found,) = warn_about_new_states(resume("--no-load-optim", 5))
    assert found.level == "warning"
    assert "are not loaded, although they fit, and start from zero" in found.text


CURRICULUM = (
    "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 8 16 "
    "--curriculum-max-steps 6"
)


def test_curriculum_that_differs_needs_a_decision() -> None:
    (found,) = check_curriculum(resume("", 3, saved_flags=CURRICULUM))
    assert found.level == "error"
    assert "the curriculum differs from the checkpoint's: none here" in found.text
    assert "iteration 4 has sequences of 16 tokens here and of 8 in the checkpoint" in found.text
    (found,) = check_curriculum(resume(CURRICULUM, 3))
    assert "iteration 4 has sequences of 8 tokens here and of 16 in the checkpoint" in found.text
    assert "give --override-lr-scheduler to continue with this command line's" in found.text
    (found,) = check_curriculum(resume("--override-lr-scheduler", 3, saved_flags=CURRICULUM))
    assert found.level == "warning"
    assert found.text.startswith("--override-lr-scheduler changes the curriculum: none here")
    keep = resume("--use-checkpoint-lr-scheduler", 3, saved_flags=CURRICULUM)
    (found,) = check_curriculum(keep)
    assert found.text.startswith("--use-checkpoint-lr-scheduler keeps the checkpoint's: none here")


def test_curriculum_that_has_ended_may_be_left_out() -> None:
    assert list(check_curriculum(resume(CURRICULUM, 3, saved_flags=CURRICULUM))) == []
    assert list(check_curriculum(resume("", 5, saved_flags=CURRICULUM))) != []
    assert list(check_curriculum(resume("", 6, saved_flags=CURRICULUM))) == []
