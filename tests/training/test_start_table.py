"""The rows of the table at the start of a run."""

import re
from pathlib import Path

from training.runs import Runner

CORPUS = Path(__file__).resolve().parents[1] / "fixtures" / "openwebtext-100"
FILES = f"--vocab-file {CORPUS}/gpt2-tiny-vocab.json --merge-file {CORPUS}/gpt2-tiny-merges.txt"


def test_experts_and_the_mean_of_the_loss_have_rows_of_their_own(run: Runner) -> None:
    masks = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
    experts = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
    log = run(f"{FILES} {masks} {experts} --train-iters 1 --eval-iters 0")
    assert re.search(r"experts +\| 2 of 4 for a token +\| 4 on a rank, expert parallel 1\n", log)
    rows = re.findall(r"^ ([\w ]*?) +\| ", log, re.MULTILINE)
    table = [row for row in rows if not row.startswith("iteration")]
    assert {"loss", "loss mean"} <= set(table)
    assert len(table) == len(set(table))
