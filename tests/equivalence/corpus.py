"""The tiny GPT and the real text that the equivalence tests train on."""

from collections.abc import Callable
from pathlib import Path

from megatron.observe.metrics import read_metrics

# Heads and groups divide by 4; 5000 ids pad to 5088, 5184 and 5376 rows for tensor-parallel sizes 1, 2 and 4. Six layers on four
# stages are cut unevenly, on two they are three virtual stages each.
_SIZES = "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --make-vocab-size-divisible-by 96"
_RATE = "--lr 1e-3 --lr-decay-style cosine"
_RUN = "--log-interval 1 --eval-interval 1000 --eval-iters 0 --seed 1234"
SHAPES = {
    "gpt2": "",
    "llama": "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 160 "
    "--num-query-groups 4 --no-add-bias-linear",
    "bloom": "--position-embedding-type alibi --embed-layernorm --init-method-std small",
}
UNTIED = "--untie-embeddings-and-output-weights"
COURSES = {
    # Batch sizes 4 4 4 4 8 8 12 12 16 16.
    "ramp": "--rampup-batch-size 4 4 48 --global-batch-size 16 --train-samples 88 --lr-decay-samples 176 --lr-warmup-samples 8",
    # Four iterations of 32 tokens, six of 64.
    "curriculum": "--curriculum-schedule-type fixed_discrete --curriculum-difficulties 32 64 --curriculum-max-steps 4 "
    "--global-batch-size 8 --train-iters 10 --train-tokens 1000000 --lr-decay-tokens 10000 --lr-warmup-iters 2",
}
"""What changes in the middle of the 10 iterations: the batch size, or the sequence length."""
SIZES = {"ramp": (4, 8, 12, 16), "curriculum": (8,)}
"""The batch sizes of each course."""
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
EVALUATED = "--eval-interval 4 --eval-iters 2 --split 80,20,0"
Single = Callable[[str, bool, str], Path]
"""(shape, tied, course) -> the folder of one process's run, with checkpoints after 5 and 10 steps."""


def command(folder: Path, data: str, shape: str, course: str, *flags: str) -> list[str]:
    """A command line that trains `shape` on `data` (a prefix) for 10 iterations; metrics and checkpoints are kept in `folder`."""
    text = " ".join((_SIZES, _RATE, _RUN, SHAPES[shape], COURSES[course], *flags))
    paths = ["--data-path", data, "--save", str(folder), "--load", str(folder)]
    return [
        *text.split(),
        *paths,
        "--vocab-size",
        "5000",
        "--data-cache-path",
        str(folder / "cache"),
    ]


def curve(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each iteration."""
    return [
        (entry["lm_loss"], entry["grad_norm"])
        for entry in read_metrics(folder / "metrics.jsonl")
        if "lm_loss" in entry
    ]


def validation(folder: Path) -> list[tuple[float]]:
    """Loss of each evaluation."""
    entries = read_metrics(folder / "metrics.jsonl")
    return [(entry["validation"]["validation"],) for entry in entries if "validation" in entry]


def worst(a: list[tuple[float, ...]], b: list[tuple[float, ...]]) -> float:
    """The largest relative difference between two curves of the same length."""
    assert len(a) == len(b) > 0, f"curves of {len(a)} and {len(b)} iterations"
    return max(
        abs(x - y) / abs(y)
        for left, right in zip(a, b, strict=True)
        for x, y in zip(left, right, strict=True)
    )
