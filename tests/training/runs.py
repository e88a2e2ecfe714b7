"""Runs of the main job in the pool's processes, as black boxes.

A command line goes in. Loss curve, log and files come out.
"""

import dataclasses
import re
from pathlib import Path

from process_pool import Outcome, ProcessPool, pretrain

from megatron.checkpoint.digest import digest_of_file
from megatron.checkpoint.manifest import CONFIG, MANIFEST, read_manifest
from megatron.observe.metrics import read_metrics

SIZES = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 --lr 2e-3 "
    "--lr-decay-style constant --log-interval 1 --eval-interval 1000 --eval-iters 0 "
    "--vocab-size 5000 --train-iters 10"
)


def rewrite_config(folder: Path, pattern: str, replacement: str) -> None:
    """Change a line in the configuration of a checkpoint, as an earlier version stored it."""
    config = folder / CONFIG
    old, count = re.subn(pattern, replacement, config.read_text())
    assert count == 1
    config.write_text(old)
    digest = digest_of_file(config)
    manifest = read_manifest(folder)
    facts = {"bytes": digest.bytes, "xxh128": digest.xxh128}
    manifest = dataclasses.replace(manifest, files={**manifest.files, CONFIG: facts})
    (folder / MANIFEST).write_text(manifest.dump_json())


class Runner:
    """Train in a folder. Each call is one launch."""

    def __init__(self, pool: ProcessPool, data: str, folder: Path) -> None:
        self.pool = pool
        self.data = data
        self.folder = folder

    def argv(self, flags: str) -> list[str]:
        folder = str(self.folder)
        paths = ("--data-path", self.data, "--data-cache-path", f"{folder}/cache")
        return [*SIZES.split(), *paths, "--save", folder, "--load", folder, *flags.split()]

    def outcomes(self, flags: str = "", ranks: int = 1) -> list[Outcome]:
        return self.pool.run(ranks, pretrain, self.argv(flags))

    def __call__(self, flags: str = "", ranks: int = 1) -> str:
        """Return what rank 0 printed. Fail the test if a rank failed."""
        from process_pool import succeed

        return succeed(self.outcomes(flags, ranks))

    def error(self, flags: str = "", ranks: int = 1) -> str:
        """Return rank 0's error as `Kind: message`. Fail the test if there was none."""
        outcome = self.outcomes(flags, ranks)[0]
        assert outcome.error is not None, f"there was no error:\n{outcome.output}"
        return f"{outcome.kind}: {outcome.error}"

    def metrics(self) -> list[dict]:
        return read_metrics(self.folder / "metrics.jsonl")

    def losses_of_training(self) -> list[int]:
        """Return the iterations that were trained."""
        return [entry["iteration"] for entry in self.metrics() if "lm_loss" in entry]

    def losses(self) -> dict[int, float]:
        return {entry["iteration"]: entry["lm_loss"] for entry in self.metrics()}
