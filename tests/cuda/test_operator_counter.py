"""The counter of benchmarks/bytes_per_operator.py, on cases that are computed by hand."""

import sys
from pathlib import Path
from typing import Any

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import PLAIN

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
Numbers = tuple[int, int, int]
"""Bytes read, bytes written, FLOPs."""
LLAMA = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 8 --vocab-size 101 --train-iters 10 --lr 1e-3 "
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--untie-embeddings-and-output-weights --no-add-bias-linear --bf16 "
    "--hidden-dropout 0 --attention-dropout 0 "
)


def count_calls() -> dict[str, Numbers]:
    """Run operators on the fake GPU, and return what the counter makes of each."""
    import torch

    sys.path.insert(0, BENCHMARKS)
    from operator_counter import OperatorCounter

    from megatron.extras.planner.dry_run.fake_rank import get_gpu

    library = torch.library.Library("counted", "DEF")
    library.define("halve(Tensor x, Tensor(a!) logits) -> Tensor")
    library.impl("halve", lambda x, logits: x.new_empty(x.shape[0]), "Meta")
    found: dict[str, Numbers] = {}
    counter = OperatorCounter()

    def finish(name: str) -> None:
        works = counter.counts.values()
        found[name] = tuple(sum(getattr(each, key) for each in works) for key in KEYS)
        counter.counts.clear()

    with get_gpu() as gpu, gpu.watch(counter.count):
        bf16: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        a, b = torch.empty(3, 5, **bf16), torch.empty(5, 7, **bf16)
        c = torch.empty(3, 7, device="cuda")
        index = torch.empty(3, 1, dtype=torch.int64, device="cuda")
        query = torch.empty(2, 4, 16, 8, **bf16)
        finish("factories")
        a.view(15).view(5, 3).t()[1:].detach().expand(2, -1, -1)
        finish("views")
        torch.mm(a, b)
        finish("product")
        torch.addmm(c, a, b, out_dtype=torch.float32, out=c)
        finish("sum of a product")
        c.add_(c)
        finish("in place")
        c.copy_(a[:, :1])
        finish("cast of a column")
        c.mul(index.expand(3, 7))
        finish("expanded")
        c.gather(1, index)
        finish("gather")
        c.scatter_add_(1, index, c[:, :1])
        finish("scatter")
        torch._foreach_mul_([c, c[0]], 2.0)
        finish("lists")
        torch.ops.counted.halve(a, c)
        finish("own operator")
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        finish("attention")
        torch.zeros(4, device="cpu").add_(1)
        finish("host")
    library._destroy()
    return found


KEYS = ("reads", "writes", "flops")


def test_operators_count_what_they_read_and_write(on_fake_gpu: Call):
    found = on_fake_gpu(count_calls)
    attention = found.pop("attention")
    assert found == {
        "factories": (0, 0, 0),
        "views": (0, 0, 0),
        "product": (2 * (15 + 35), 2 * 21, 2 * 3 * 5 * 7),
        "sum of a product": (4 * 21 + 2 * (15 + 35), 4 * 21, 2 * 3 * 5 * 7),
        "in place": (2 * 4 * 21, 4 * 21, 0),
        "cast of a column": (2 * 3, 4 * 21, 0),
        # The index is stored once for each row.
        "expanded": (4 * 21 + 8 * 3, 4 * 21, 0),
        "gather": (4 * 3 + 8 * 3, 4 * 3, 0),
        "scatter": (4 * 3 + 8 * 3 + 4 * 3, 4 * 3, 0),
        "lists": (4 * (21 + 7), 4 * (21 + 7), 0),
        "own operator": (2 * 15 + 4 * 21, 2 * 3 + 4 * 21, 0),
        "host": (0, 0, 0),
    }
    # Two products of [16, 8] and [8, 16] for each head and sample, of which the half is causal.
    assert attention[2] == 2 * 2 * (2 * 4) * 16 * 16 * 8 // 2
    assert attention[0] == 3 * 2 * 2 * 4 * 16 * 8


def count_parts(microbatches: int) -> dict[str, Numbers]:
    """Return the sums of each part of a step."""
    sys.path.insert(0, BENCHMARKS)
    from operator_counter import count_case
    from operator_work import Case

    found: dict[str, Numbers] = {}
    for (part, _), work in count_case(Case(LLAMA + PLAIN, microbatches)).items():
        before = found.get(part, (0, 0, 0))
        found[part] = tuple(b + getattr(work, key) for b, key in zip(before, KEYS, strict=True))
    return found


def test_a_step_is_divided_among_its_parts(on_fake_gpu: Call):
    microbatches, layers, h, f, v = 4, 2, 64, 96, 128
    tokens = microbatches * 32 * 2
    parts = on_fake_gpu(count_parts, microbatches)
    of_layers = layers * (4 * h * h + 3 * h * f)
    vectors = (2 * layers + 1) * h
    matrices = 2 * v * h + of_layers
    parameters = matrices + vectors
    # A gradient is cast from bf16 to fp32. After the first microbatch, it is added to the sum.
    assert parts["sums of gradients"] == (
        matrices * (2 * microbatches + 8 * (microbatches - 1)),
        matrices * (4 * microbatches + 4 * (microbatches - 1)),
        0,
    )
    # Those of vectors are joined in bf16, and cast by the copy or addition to the sum.
    assert parts["sums of vectors' gradients"] == (
        vectors * (2 * microbatches + 2 * microbatches + 4 * (microbatches - 1)),
        vectors * (2 * microbatches + 4 * microbatches),
        0,
    )
    # SiLU and a product forward. Two products and the gradient of SiLU backward.
    assert parts["activation of the MLP"] == (
        2 * tokens * layers * f * (1 + 2 + 4 + 2),
        2 * tokens * layers * f * (1 + 1 + 2 + 1),
        0,
    )
    # Each weight takes part in three products, except the embedding.
    assert parts["products"][2] == 6 * tokens * (of_layers + v * h)
    # One addition after attention and one after the MLP. Backward, the gradient of a layer's input
    # has two summands at each norm. Those at the two matrices of the MLP are added by a product.
    assert parts["residuals"][1] == 2 * tokens * layers * h * (2 + 2)
    assert parts["norms"] == (
        (2 * layers + 1) * (2 * 3 * tokens * h + 4 * tokens + microbatches * 2 * 2 * h),
        (2 * layers + 1) * (2 * 2 * tokens * h + 4 * tokens + microbatches * 2 * h),
        0,
    )
    assert parts["loss"][0] > 20 * tokens * 101
    assert parts["rotary positions"][1] > 0
    assert parts["optimizer"][0] > 16 * parameters
    assert parts["other"][0] < 100


def count_launches(shape: str) -> dict[str, tuple[int, int]]:
    """Return the launches and the bytes of each part of a microbatch."""
    sys.path.insert(0, BENCHMARKS)
    import step_counts

    further, _ = step_counts.count_launches(shape, step_counts._KERNELS)
    return {part: (work.calls, work.reads + work.writes) for part, work in further.items()}


@pytest.mark.full
@pytest.mark.parametrize(("shape", "launches", "gb"), [("gpt2", 400, 48), ("nanochat", 350, 47)])
def test_a_microbatch_has_few_launches(
    shape: str, launches: int, gb: float, on_fake_gpu: Call
) -> None:
    parts = on_fake_gpu(count_launches, shape)
    assert sum(calls for calls, _ in parts.values()) <= launches
    assert sum(moved for _, moved in parts.values()) <= gb * 1e9
    assert parts["sums of vectors' gradients"][0] <= 4
