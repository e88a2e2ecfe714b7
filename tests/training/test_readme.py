"""The README's command gives the same losses with two processes as with one."""

import re
import shlex
from pathlib import Path

import pytest
from process_pool import ProcessPool, pretrain, succeed

from megatron.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FIXTURES = ROOT / "tests" / "fixtures" / "openwebtext-100"


def read_flags() -> list[str]:
    """Return the flags of the README's first training, without its files."""
    found = re.search(r"^python pretrain_gpt\.py (.*?[^\\])\n", README, re.MULTILINE | re.DOTALL)
    assert found is not None
    words = shlex.split(found.group(1).replace("\\\n", " ").replace("$TOKENIZER", ""))
    files = {words.index(flag) for flag in ("--data-path", "--save", "--load")}
    return [word for at, word in enumerate(words) if not {at, at - 1} & files]


@pytest.mark.full
def test_two_processes_print_the_losses_of_one(
    pool: ProcessPool, corpus: str, tmp_path: Path
) -> None:
    found = re.search(r"torchrun --nproc-per-node 2 pretrain_gpt\.py ([^`]*)`", README)
    assert found is not None
    curves = []
    for ranks, layout in ((1, ""), (2, found.group(1))):
        folder = tmp_path / str(ranks)
        argv = [
            *read_flags(),
            *("--train-iters", "20", "--log-interval", "1", "--eval-iters", "0"),
            *("--vocab-file", str(FIXTURES / "gpt2-tiny-vocab.json")),
            *("--merge-file", str(FIXTURES / "gpt2-tiny-merges.txt")),
            *("--data-path", corpus, "--save", str(folder), "--data-cache-path", str(folder)),
            *layout.split(),
        ]
        assert not {"--hidden-dropout", "--attention-dropout"} & {*argv}
        succeed(pool.run(ranks, pretrain, argv))
        metrics = read_metrics(folder / "metrics.jsonl")
        curves.append([entry["lm_loss"] for entry in metrics if "lm_loss" in entry])
    alone, together = curves
    assert len(alone) == len(together) == 20
    assert together == pytest.approx(alone, rel=1e-5)
