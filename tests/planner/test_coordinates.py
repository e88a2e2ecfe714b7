"""The coordinate check: sizes of activations and of their changes, by width and depth."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.extras.planner.commands import ladder

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
BASE = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-2 "
    f"--vocab-file {FIXTURES}/gpt2-tiny-vocab.json --merge-file {FIXTURES}/gpt2-tiny-merges.txt "
    "--position-embedding-type rotary --normalization RMSNorm --no-add-bias-linear "
    "--hidden-dropout 0 --attention-dropout 0 --micro-batch-size 8 --global-batch-size 8 "
    "--init-method-std 0.1"
).split()
HIDDEN = ("attention", "MLP", "residual stream")
# What transfers over the width -> the largest slope of a hidden change.
TRANSFERS = [
    "--parametrization mup",
    "--parametrization mup --optimizer muon --num-query-groups 1",
    "--parametrization mup --optimizer ademamix --num-experts 4 --moe-ffn-hidden-size 16",
    "--parametrization completep --glu-activation swiglu --ffn-hidden-size 96 --qk-norm head",
]


def check(capfd: pytest.CaptureFixture[str], corpus: str, cache: Path, flags: str) -> Any:
    """Return the exit code, and the slopes by direction, part and time."""
    data = ["--data-path", corpus, "--data-cache-path", str(cache)]
    training = ["--", *BASE, *data, *flags.split()]
    code = ladder.main(["check", "--seeds", "1", "--json", *training])
    found = json.loads(capfd.readouterr().out)
    return code, {(row["direction"], row["part"], row["what"]): row["slope"] for row in found}


@pytest.mark.parametrize("flags", TRANSFERS)
def test_changes_do_not_grow_with_the_width(
    capfd: pytest.CaptureFixture[str], corpus: str, tmp_path: Path, flags: str
) -> None:
    code, slopes = check(capfd, corpus, tmp_path, flags)
    assert code == 0
    assert slopes["width", "logits", "at the start"] == pytest.approx(-0.5, abs=0.05)
    for part in HIDDEN:
        assert slopes["width", part, "change"] < 0.1
        assert abs(slopes["width", part, "at the start"]) < 0.1
    assert (slopes["depth", "residual stream", "change"] > 0.3) == ("completep" not in flags)


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_changes_grow_without_a_parametrization(
    capfd: pytest.CaptureFixture[str], corpus: str, tmp_path: Path, optimizer: str
) -> None:
    code, slopes = check(capfd, corpus, tmp_path, f"--optimizer {optimizer}")
    assert code == 1
    assert min(slopes["width", part, "change"] for part in HIDDEN) > 0.3


def test_a_base_model_has_no_base_and_a_picture_is_drawn(
    capfd: pytest.CaptureFixture[str], corpus: str, tmp_path: Path
) -> None:
    flags = [*BASE, "--data-path", corpus, "--data-cache-path", str(tmp_path)]
    picture = tmp_path / "check.png"
    mup = [*flags, "--parametrization", "mup"]
    assert ladder.main(["check", "--", *mup, "--base-width", "32"]) != 0
    assert "leave out --base-width" in capfd.readouterr().err
    assert ladder.main(["check", "--seeds", "0", "--", *mup]) != 0
    assert "at least 1" in capfd.readouterr().err
    assert ladder.main(["check", "--seeds", "1", "--picture", str(picture), "--", *mup]) == 0
    assert "-0.5" in capfd.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
