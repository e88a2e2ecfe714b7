"""The planner's formulas of a block against the operators of one block on a fake GPU.

The formulas run without torch. `test_predicted_memory.py` compares the peaks of whole steps. Here
the parts of a block are compared, so that a change of a module names the formula that must follow.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import Case, plan_case

from megatron.extras.planner.cost import layers
from megatron.extras.planner.cost.experts import LAYERS
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.layout import StepJob
from megatron.extras.planner.cost.tensors import TensorCase, measure_tensors
from megatron.extras.planner.prediction import predict_plan

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
TOKENS, HIDDEN, LENGTH = 512, 512, 256
GPT = (
    f"--no-gradient-accumulation-fusion --hidden-size {HIDDEN} --num-attention-heads 8 "
    f"--seq-length {LENGTH} --micro-batch-size {TOKENS // LENGTH} "
)
PLAIN = "--no-rope-fusion --no-bias-swiglu-fusion --no-residual-norm-fusion "
LLAMA = (
    f"{GPT} --bf16 --swiglu --normalization rmsnorm --disable-bias-linear "
    "--position-embedding-type rotary "
)
TP = "--tensor-model-parallel-size 2 "
GROUPS = "--num-query-groups 2 "
RECOMPUTED = "--checkpoint-activations "
KEEP = "--checkpoint-keep-operators"
Pair = tuple[int, int]
"""A number of the forward pass and one of the backward pass."""


@dataclass(frozen=True)
class Shape:
    """A block, and how the formulas are known to differ from its operators."""

    flags: str
    ranks: int = 1
    moved: float | None = 1.0
    """Bytes of the formula, relative to those of the operators. None: they are not compared."""
    kept: int = 0
    """Bytes that the block keeps and the formula leaves out."""


# What has no comment differs by less than 1 %.
SHAPES = {
    "GPT": Shape(f"{GPT} --bf16 {PLAIN}"),
    "GPT, fp16": Shape(f"{GPT} --fp16 {PLAIN}"),
    "GPT, dropout": Shape(f"{GPT} --bf16 --hidden-dropout 0.1 {PLAIN}"),
    "GPT, ALiBi": Shape(f"{GPT} --bf16 --position-embedding-type alibi {PLAIN}"),
    "GPT, parallel residual": Shape(f"{GPT} --bf16 --parallel-residual {PLAIN}"),
    "GPT, heads of 80": Shape(f"{GPT} --bf16 --kv-channels 80 {PLAIN}"),
    # The backward pass of attention computes it again, and nothing else.
    "GPT, attention recomputed": Shape(f"{GPT} --bf16 --recompute-attention-core {PLAIN}"),
    # The formula has sums of the residual stream beside the norms. One kernel computes both.
    "GPT, kernels": Shape(f"{GPT} --bf16", moved=1.09),
    # The result of attention is copied to another order.
    "GPT, fp32": Shape(f"{GPT} {PLAIN}", moved=0.93),
    # The formula has 16 bits for each value of the stream. Norms keep further numbers of a token.
    "GPT, stream in fp32": Shape(
        f"{GPT} --bf16 --fp32-residual-connection", moved=0.60, kept=4 * 4 * TOKENS
    ),
    # Sums over ranks are made in place, on a copy, and biases are added after them.
    "GPT, tensor parallelism": Shape(f"{GPT} --bf16 {TP} {PLAIN}", 2, moved=0.83),
    "GPT, sequence parallelism": Shape(f"{GPT} --bf16 {TP} --sequence-parallel {PLAIN}", 2, 0.97),
    "GPT, recomputed": Shape(f"{GPT} --bf16 {RECOMPUTED}", moved=None),
    "GPT, kept operators": Shape(f"{GPT} --bf16 {RECOMPUTED} {KEEP} matmul attention", moved=None),
    "GPT, kept attention": Shape(f"{GPT} --bf16 {RECOMPUTED} {KEEP} attention", moved=None),
    # Two operators make the square of ReLU, and some twenty xIELU. The formula has one number for
    # activations without a kernel.
    "GPT, squared ReLU": Shape(f"{GPT} --bf16 --activation squared_relu {PLAIN}", moved=0.83),
    "GPT, xIELU": Shape(f"{GPT} --bf16 --activation xielu {PLAIN}", moved=0.12),
    "Llama": Shape(f"{LLAMA} {PLAIN}"),
    "Llama, GEGLU": Shape(f"{LLAMA} {PLAIN} --glu-activation geglu"),
    "Llama, ReGLU": Shape(f"{LLAMA} {PLAIN} --glu-activation reglu"),
    "Llama, window": Shape(f"{LLAMA} {PLAIN} --sliding-window 64"),
    # LiGLU has no activation function, and the limits of the clamped SwiGLU are operators of their
    # own. The formula has one number for all gates.
    "Llama, LiGLU": Shape(f"{LLAMA} {PLAIN} --glu-activation liglu", moved=1.12),
    "Llama, clamped SwiGLU": Shape(f"{LLAMA} {PLAIN} --glu-activation clamped_swiglu", moved=0.57),
    # In 16 bits the rotation converts to fp32 and back, which the formula has for fp32 too.
    "Llama, fp32": Shape(f"{LLAMA.replace('--bf16', '')} {PLAIN}", moved=1.13),
    # As for GPT with kernels.
    "Llama, kernels": Shape(LLAMA, moved=1.09),
    "Llama, sequence parallelism": Shape(f"{LLAMA} {TP} --sequence-parallel", 2, moved=1.15),
    "Llama, recomputed": Shape(f"{LLAMA} {RECOMPUTED}", moved=None),
    # Values are not rotated. The formula counts the rotation by the width of all three.
    "Llama, grouped queries": Shape(f"{LLAMA} {GROUPS} {PLAIN}", moved=0.95),
    # The kernel of the rotation writes queries in one piece, so they are not copied.
    "Llama, grouped queries, kernels": Shape(f"{LLAMA} {GROUPS}", moved=1.18),
    # Ranks that share a query group keep its keys and values in two more forms.
    "Llama, ranks share groups": Shape(
        f"{LLAMA} {GROUPS} --tensor-model-parallel-size 4", 4, 1.10, kept=2 * 2 * 2 * 64 * TOKENS
    ),
    # One kernel normalises and rotates. It keeps a number of each query and key.
    "Llama, norms of heads": Shape(f"{LLAMA} --qk-norm head", moved=1.23, kept=4 * 16 * TOKENS),
    # Operators compute this norm in fp32. It keeps two numbers of each token.
    "Llama, norms of projections": Shape(
        f"{LLAMA} --qk-norm full", moved=0.35, kept=4 * 2 * TOKENS
    ),
    # The formula of the router is one of about two tensors of scores. Operators of their own
    # multiply with experts, and the recorder does not know their FLOPs.
    "Llama, experts": Shape(
        f"{LLAMA} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256",
        moved=None,
        kept=-10_208,
    ),
}


@dataclass(frozen=True)
class Recorded:
    """What a block does with one microbatch."""

    kept: int
    """Bytes that the forward pass leaves for the backward pass, with the input."""
    products: Pair
    """FLOPs of matrix products."""
    attention: Pair
    """FLOPs of attention kernels."""
    moved: int
    """Bytes that all other kernels of both passes read and write."""


def record_block(case: Case) -> Recorded:
    """Run both passes of the first block of a rank."""
    import torch

    sys.path.insert(0, BENCHMARKS)
    from operator_counter import _GRADIENT_SUMS, OperatorCounter
    from operator_work import ATTENTION, ATTENTION_BACKWARD, PRODUCTS

    from megatron.extras.planner.dry_run.fake_rank import use_rank
    from megatron.extras.planner.dry_run.process import choose_fake_kernels
    from megatron.extras.watch.operator_mode import COLLECTIVES
    from megatron.model.experts.routing import Routing
    from megatron.model.inputs import Inputs

    plan = choose_fake_kernels(plan_case(case))
    config = plan.config
    counter = OperatorCounter()
    parts = []
    with use_rank(plan, case.rank) as rank:
        gpu = rank.gpu
        stage = rank.engine.stages[0]
        stage.train()
        block = stage.get_blocks()[0]
        counter.start(rank)
        size = config.batch.micro_batch_size
        tokens = torch.zeros((size, LENGTH), dtype=torch.long, device="cuda")
        inputs = Inputs(tokens).to(tokens.device)
        dtype = stage._dtype or torch.float32
        positions = stage.position_tables.make_positions(inputs, dtype)
        if config.precision.fp32_residual_connection:
            dtype = torch.float32
        sharing = rank.mesh.grid.tensor if config.parallel.sequence_parallel else 1
        shape = (LENGTH // sharing, size, HIDDEN)
        x = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)

        def run() -> torch.Tensor:
            return block(x, positions, inputs.dropout_key, Routing(1.0, size))

        # The first pass makes tables that later ones share.
        run()
        before = gpu.memory.measure_kept()
        with gpu.watch(counter.count):
            out = run()
            # The output is as large as the input, which the block keeps.
            kept = sum(gpu.memory.measure_kept().values()) - sum(before.values())
            parts.append(dict(counter.counts))
            counter.counts.clear()
            torch.autograd.grad(out, [x, *block.parameters()], torch.empty_like(out))
            parts.append(dict(counter.counts))

    def add_flops(*names: str) -> Pair:
        forward, backward = (
            sum(work.flops for (part, _), work in each.items() if part in names) for each in parts
        )
        return forward, backward

    attention = (ATTENTION, ATTENTION_BACKWARD)
    moved = sum(
        work.reads + work.writes
        for each in parts
        for (part, operator), work in each.items()
        if part not in (PRODUCTS, *attention, _GRADIENT_SUMS) and operator not in COLLECTIVES
    )
    return Recorded(kept, add_flops(PRODUCTS), add_flops(*attention), moved)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_formulas_of_a_block_are_those_of_its_operators(shape: Shape, on_fake_gpu: Call) -> None:
    case = Case(shape.flags, shape.ranks)
    found = on_fake_gpu(record_block, case)
    job = predict_plan(plan_case(case), load_hardware("h100")).job
    layer = job.shape.describe_layer(0)
    windowed = layer.window is not None
    case_ = TensorCase(job.shape, job.layout, job.software, False, False, windowed)
    sizes = measure_tensors(case_, LAYERS.require(layer.mlp).tensors)
    recomputed = job.layout.recompute == "full"
    kept = sizes.recomputed_layer if recomputed else sizes.layer
    # Attention keeps the state of its random numbers, 16 bytes, and xIELU keeps two numbers.
    assert 0 <= found.kept - kept - shape.kept <= 32
    if layer.experts:
        return
    products, attention, moved = predict_work(job, layer.window)
    assert found.products[0] == sum(products)
    again = 0
    operators = job.software.kept_operators
    if recomputed and "matmul" not in operators:
        # The planner counts a complete forward pass. torch ends it before the last product.
        again = sum(products[:-1])
    assert found.products[1] == 2 * sum(products) + again
    # Five products instead of two, and those of a recomputation.
    runs_again = job.layout.recompute == "selective" or (
        recomputed and "attention" not in operators
    )
    assert found.attention == (attention, (2.5 + runs_again) * attention)
    if shape.moved is not None:
        assert moved / found.moved == pytest.approx(shape.moved, abs=0.01)


def predict_work(job: StepJob, window: int | None) -> tuple[list[int], float, float]:
    """Return the planner's numbers for a layer.

    Returns:
        FLOPs of each product and of attention in the forward pass. Bytes of other kernels in both.
    """
    attention: list[float] = []

    def take_flops(flops: float, *arguments: object, **options: object) -> float:
        attention.append(flops)
        return 0.0

    # These two numbers are fitted, and turn bytes into time.
    software = replace(job.software, pointwise=1.0)
    with (
        mock.patch.object(layers, "_NORM", 1.0),
        mock.patch.object(layers, "estimate_flash_seconds", take_flops),
    ):
        times = layers.LayerTimes(job.shape, job.layout, software, job.hardware)
        pointwise = times._estimate_pointwise()
        times._estimate_core(window)
    seconds = (pointwise.forward + pointwise.backward).total
    products = [2 * each.m * each.n * each.k for each in times._list_projections()]
    return products, attention[0], seconds * job.hardware.memory_rate
