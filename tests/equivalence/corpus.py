"""The tiny GPT and the real text that the equivalence tests train on."""

from pathlib import Path

from megatron.observe.metrics import read_metrics

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"

# Heads and groups divide by 4; 5000 ids pad to 5088, 5184 and 5376 rows for tensor-parallel sizes 1, 2 and 4.
_SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --make-vocab-size-divisible-by 96"
_BATCH = "--micro-batch-size 2 --global-batch-size 8 --lr 2e-3 --lr-warmup-iters 2 --lr-decay-iters 20 --lr-decay-style cosine"
_RUN = "--log-interval 1 --eval-interval 1000 --eval-iters 0 --seed 1234"
SHAPES = {
    "gpt2": "",
    "llama": "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu --ffn-hidden-size 160 "
    "--num-query-groups 4 --no-add-bias-linear --untie-embeddings-and-output-weights",
    "bloom": "--position-embedding-type alibi --embed-layernorm --init-method-std small",
}
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"


def command(folder: Path, data: str, shape: str, *flags: str, iterations: int = 10) -> list[str]:
    """A command line that trains `shape` on `data` (a prefix) and keeps its metrics and checkpoints in `folder`."""
    text = " ".join((_SIZES, _BATCH, _RUN, SHAPES[shape], *flags))
    paths = ["--data-path", data, "--save", str(folder), "--load", str(folder)]
    paths += ["--vocab-size", "5000", "--data-cache-path", str(folder / "cache")]
    return [*text.split(), *paths, "--train-iters", str(iterations)]


def curve(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each iteration."""
    return [(entry["lm_loss"], entry["grad_norm"]) for entry in read_metrics(folder / "metrics.jsonl")]


def worst(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """The largest relative difference between two curves of the same length."""
    assert len(a) == len(b) > 0, f"curves of {len(a)} and {len(b)} iterations"
    return max(abs(x - y) / abs(y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))
