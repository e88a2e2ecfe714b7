"""The planner's memory of each stage against steps on fake GPUs, which run here.

Nothing is recorded, so a change of the trainer that needs more memory fails here until the formulas
of `megatron.extras.planner.cost.tensors` follow it.
"""

from dataclasses import dataclass

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import measure_peaks

from megatron.extras.interop.translators.translator import load_config
from megatron.extras.planner.cost.hardware import load_hardware
from megatron.extras.planner.cost.tensors import LOGIT_CHUNK_BYTES, LOGIT_TILE_ROWS
from megatron.extras.planner.prediction import predict_plan
from megatron.plan.resolve import resolve

RUN = "--train-iters 10 --lr 1e-4 --global-batch-size 64 "
LLAMA = (
    RUN + "--preset llama2-7b --num-layers 4 --seq-length 2048 --micro-batch-size 1 --bf16 "
    "--zero-stage 1 "
)
GPT = RUN + "--preset gpt2-xl --num-layers 6 --micro-batch-size 2 --bf16 --zero-stage 1 "
"""It has dropout, biases, LayerNorm, learned positions and tied embeddings."""
ALIBI = (
    RUN + "--num-layers 6 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 "
    "--vocab-size 50257 --micro-batch-size 2 --position-embedding-type alibi --embed-layernorm "
)
GROUPED = (
    RUN + "--preset llama3-8b --num-layers 4 --seq-length 2048 --micro-batch-size 1 "
    "--vocab-size 32000 "
)
OLMOE = (
    RUN + "--preset olmoe-1b-7b --num-layers 3 --seq-length 2048 --micro-batch-size 1 --bf16 "
    "--moe-aux-loss-coeff 0.01 "
)
QWEN = (
    RUN + "--preset qwen3-30b-a3b --num-layers 4 --micro-batch-size 1 --bf16 "
    "--moe-aux-loss-coeff 0.01 --expert-model-parallel-size 8 "
)
OLMO_HYBRID = (
    RUN + "--preset olmo-hybrid-7b --num-layers 4 --seq-length 2048 --micro-batch-size 1 --bf16 "
    "--zero-stage 1 "
)
QWEN_NEXT = (
    RUN + "--preset qwen3-next-80b-a3b --num-layers 4 --num-experts 64 --seq-length 2048 "
    "--micro-batch-size 1 --bf16 --zero-stage 1 --moe-aux-loss-coeff 0.01 "
)
BF16_MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95"
KEPT = "--checkpoint-activations --checkpoint-keep-operators "
TENSORWISE = "--fp8-format hybrid --fp8-recipe tensorwise"
ROWWISE = "--fp8-format e4m3 --fp8-recipe rowwise"
BLOCKS = "--rope-fusion --bias-swiglu-fusion"
FUSED = "--gradient-accumulation-fusion"


@dataclass(frozen=True)
class Job:
    """A command, its world, and the pipeline ranks that are compared."""

    flags: str
    world_size: int = 8
    stages: tuple[int, ...] = (0,)


JOBS = {
    "one GPU": Job(LLAMA, 1),
    "ZeRO 1, moments in bf16": Job(f"{LLAMA} {BF16_MOMENTS}"),
    "ZeRO 3": Job(f"{LLAMA} --zero-stage 3"),
    "tensor parallelism 8": Job(f"{LLAMA} --tensor-model-parallel-size 8 --num-layers 8", 16),
    "interleaved": Job(
        f"{LLAMA} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        2,
        (0, 1),
    ),
    "uneven stages": Job(f"{GPT} --pipeline-model-parallel-size 4", 8, (0, 1, 3)),
    "GPipe": Job(f"{GPT} --pipeline-model-parallel-size 3 --global-batch-size 4", 3, (0, 2)),
    "recomputation of a third": Job(
        f"{GPT} --checkpoint-activations --checkpoint-fraction 1/3 --zero-stage 3"
    ),
    "recomputation, stages, dropout": Job(
        f"{ALIBI} --bf16 --checkpoint-activations --pipeline-model-parallel-size 2", 4, (0, 1)
    ),
    "recomputation, inputs in host memory": Job(
        f"{ALIBI} --bf16 --checkpoint-activations --checkpoint-in-cpu", 2
    ),
    "large vocabulary": Job(
        f"{LLAMA} --vocab-size 128256 --hidden-size 2048 --num-attention-heads 16 "
        "--num-query-groups 16 --micro-batch-size 4"
    ),
    "large vocabulary, kernels of the loss": Job(
        f"{LLAMA} --vocab-size 128256 --hidden-size 2048 --num-attention-heads 16 "
        "--num-query-groups 16 --micro-batch-size 4 --cross-entropy-loss-fusion"
    ),
    "kernels of blocks, grouped queries": Job(f"{GROUPED} --bf16 {BLOCKS}", 1),
    "long sequence, small hidden size": Job(
        f"{LLAMA} --hidden-size 512 --num-attention-heads 8 --num-query-groups 8 "
        "--seq-length 65536 --checkpoint-activations"
    ),
    "grouped queries, sliding window": Job(f"{GROUPED} --bf16 --sliding-window 512"),
    "fp32, sharded, ALiBi": Job(ALIBI),
    "shared sequences, grouped queries": Job(
        f"{GROUPED} --bf16 --seq-length 16384 --context-parallel-size 4"
    ),
    "shared sequences, core recomputed": Job(
        f"{GROUPED} --bf16 --seq-length 16384 --context-parallel-size 2 --recompute-attention-core"
    ),
    "shared sequences, exchanged heads": Job(
        f"{LLAMA} --seq-length 16384 --context-parallel-size 4 --cp-comm-type a2a "
        "--tensor-model-parallel-size 2 --sequence-parallel"
    ),
    "kept operators, sequence parallelism": Job(
        f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --num-layers 8 "
        f"--micro-batch-size 4 {KEPT} matmul attention"
    ),
    "fused gradients, kept products, ZeRO 3": Job(
        f"{LLAMA} --zero-stage 3 --micro-batch-size 2 {FUSED} {KEPT} matmul"
    ),
    "float8, recomputed, ends in bf16": Job(
        f"{GROUPED} --bf16 --seq-length 16384 --zero-stage 3 --checkpoint-activations "
        f"--first-last-layers-bf16 {TENSORWISE}"
    ),
    "float8, one GPU, fused gradients": Job(f"{GROUPED} --bf16 {FUSED} {BLOCKS} {TENSORWISE}", 1),
    "float8, ZeRO 1": Job(f"{LLAMA} {TENSORWISE}"),
    "float8 by rows, recomputed, fused gradients": Job(
        f"{LLAMA} --zero-stage 3 --micro-batch-size 4 --checkpoint-activations {FUSED} {ROWWISE}"
    ),
    "experts, 64 GPUs": Job(f"{QWEN} --zero-stage 1 --global-batch-size 128", 64),
    "experts, recomputed": Job(
        f"{OLMOE} --zero-stage 2 --checkpoint-activations --micro-batch-size 4 "
        "--expert-model-parallel-size 2"
    ),
    "gated delta nets, experts, a gate of attention": Job(
        f"{QWEN_NEXT} --expert-model-parallel-size 8"
    ),
    "experts, dense layers, stages": Job(
        f"{QWEN} --zero-stage 1 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 "
        "--sequence-parallel --num-layers 6 --moe-layer-freq ([0]*2+[1]*4)",
        16,
        (0, 1),
    ),
}
MORE = {
    "gated delta nets": Job(OLMO_HYBRID, 1),
    "gated delta nets, core recomputed": Job(f"{OLMO_HYBRID} --recompute-attention-core", 1),
    "gated delta nets, recomputed": Job(f"{OLMO_HYBRID} --checkpoint-activations", 1),
    "gated delta nets, sequence parallelism": Job(
        f"{OLMO_HYBRID} --tensor-model-parallel-size 2 --sequence-parallel", 2
    ),
    "experts, one GPU": Job(f"{OLMOE} --num-layers 2", 1),
    "experts, ZeRO 3, copies on each rank": Job(f"{OLMOE} --zero-stage 3 --micro-batch-size 2"),
    "experts, HSDP": Job(
        f"{OLMOE} --zero-stage 3 --hsdp-shard-size 4 --expert-model-parallel-size 4"
    ),
    "experts, ZeRO 3": Job(f"{OLMOE} --zero-stage 3 --expert-model-parallel-size 4"),
    "experts, tensor parallelism": Job(f"{QWEN} --zero-stage 1 --tensor-model-parallel-size 4", 64),
    "experts of tensor ranks": Job(
        f"{OLMOE} --tensor-model-parallel-size 4 --expert-model-parallel-size 2", 4
    ),
    "experts, fp32": Job(f"{QWEN.replace('--bf16', '')} --zero-stage 1", 16),
    "experts, shared expert": Job(
        f"{OLMOE} --zero-stage 1 --expert-model-parallel-size 4 --micro-batch-size 4 "
        "--moe-shared-expert-intermediate-size 2048"
    ),
    "experts with biases, as in gpt-oss": Job(
        f"{OLMOE} --zero-stage 1 --expert-model-parallel-size 8 --micro-batch-size 4 "
        "--glu-activation clamped_swiglu --add-mlp-bias"
    ),
    "experts without gate": Job(
        f"{OLMOE} --zero-stage 1 --expert-model-parallel-size 8 --glu-activation None "
        "--micro-batch-size 4"
    ),
    "experts, interleaved": Job(
        f"{OLMOE} --num-layers 4 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --expert-model-parallel-size 4",
        8,
        (0, 1),
    ),
    "experts, shared sequences": Job(
        f"{OLMOE} --seq-length 8192 --context-parallel-size 4 --expert-model-parallel-size 8 "
        "--zero-stage 3"
    ),
    "experts, Muon": Job(f"{OLMOE} --expert-model-parallel-size 8 --optimizer muon"),
    "compiled": Job(f"{LLAMA} --use-torch-compile"),
    "compiled without kernels, norms of projections": Job(
        f"{LLAMA} --use-torch-compile --no-gradient-accumulation-fusion "
        "--no-cross-entropy-loss-fusion --qk-norm full",
        1,
    ),
    "recomputation, kernels of blocks": Job(
        f"{LLAMA} --micro-batch-size 4 --zero-stage 3 --checkpoint-activations"
    ),
    "float8, dropout, stages": Job(
        f"{GPT} --micro-batch-size 8 --pipeline-model-parallel-size 2 {TENSORWISE}", 4, (0, 1)
    ),
    "float8, sequence parallelism, kept operators": Job(
        f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --num-layers 8 "
        f"--micro-batch-size 4 {KEPT} matmul attention {TENSORWISE}"
    ),
    "float8 by rows, sequence parallelism, recomputed": Job(
        f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --num-layers 8 "
        f"--micro-batch-size 4 --seq-length 4096 --checkpoint-activations {ROWWISE}"
    ),
    "float8, shared sequences": Job(
        f"{GROUPED} --bf16 --seq-length 16384 --context-parallel-size 4 {TENSORWISE}"
    ),
    "kernels of blocks": Job(f"{LLAMA} {BLOCKS}"),
    "kernels of blocks, recomputation of the core": Job(
        f"{LLAMA} {BLOCKS} --micro-batch-size 2 --recompute-attention-core"
    ),
    "kernels of blocks, norms of heads": Job(f"{GROUPED} --bf16 {BLOCKS} --qk-norm head"),
    "norms of heads, grouped queries": Job(f"{GROUPED} --bf16 --qk-norm head"),
    "kernels of blocks, shared sequences": Job(
        f"{LLAMA} {BLOCKS} --seq-length 16384 --context-parallel-size 4"
    ),
    "kernels of blocks, shared sequences, exchanged heads": Job(
        f"{GROUPED} --bf16 {BLOCKS} --seq-length 16384 --context-parallel-size 4 --cp-comm-type a2a"
    ),
    "one GPU, one microbatch": Job(f"{LLAMA} --global-batch-size 1", 1),
    "ZeRO 2": Job(f"{LLAMA} --zero-stage 2"),
    "ZeRO 3, one microbatch": Job(f"{LLAMA} --zero-stage 3 --global-batch-size 8"),
    "64 ranks, HSDP": Job(f"{LLAMA} --zero-stage 3 --sharding-strategy hsdp", 64),
    "sequence parallelism": Job(
        f"{LLAMA} --tensor-model-parallel-size 4 --sequence-parallel --num-layers 8"
    ),
    "looped BFS": Job(
        f"{GPT} --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--global-batch-size 10",
        2,
        (0, 1),
    ),
    "dropout, fp16": Job(f"{GPT.replace('--bf16', '--fp16')}", 1),
    "recomputation of the core": Job(f"{ALIBI} --bf16 --recompute-attention-core"),
    "grouped queries": Job(f"{GROUPED} --bf16 --sharding-strategy fsdp"),
    "fp32": Job(GPT.replace("--bf16", ""), 1),
    "fp32, grouped queries": Job(GROUPED),
    "fused gradients": Job(f"{LLAMA} {FUSED}"),
    "kept operators": Job(f"{LLAMA} --num-layers 16 --micro-batch-size 4 {KEPT} matmul attention"),
    "kept attention": Job(f"{GPT} --micro-batch-size 8 {KEPT} attention"),
    "kept operators of a third of the layers": Job(
        f"{GPT} --micro-batch-size 8 {KEPT} matmul attention --checkpoint-fraction 1/3"
    ),
    "kept operators, stages, ALiBi": Job(
        f"{ALIBI} --bf16 {KEPT} matmul attention --pipeline-model-parallel-size 2", 4, (0, 1)
    ),
    "kept products without a kernel of attention": Job(
        f"{GROUPED} --bf16 --sliding-window 512 {KEPT} matmul"
    ),
    "kept operators, fp32": Job(f"{GPT.replace('--bf16', '')} {KEPT} matmul attention", 1),
    "fused gradients, one GPU": Job(f"{LLAMA} {FUSED}", 1),
    "fused gradients, one GPU, one microbatch": Job(f"{LLAMA} {FUSED} --global-batch-size 1", 1),
    "fused gradients, ZeRO 2": Job(f"{LLAMA} --zero-stage 2 {FUSED}"),
    "fused gradients, one microbatch": Job(f"{LLAMA} --zero-stage 3 --global-batch-size 8 {FUSED}"),
    "fused gradients, fp16, large vocabulary": Job(
        f"{LLAMA.replace('--bf16', '--fp16')} --vocab-size 128256 --hidden-size 2048 "
        f"--num-attention-heads 16 --num-query-groups 16 --micro-batch-size 4 {FUSED}",
        1,
    ),
    "fused gradients, uneven stages": Job(
        f"{GPT} --pipeline-model-parallel-size 4 {FUSED}", 8, (0, 1, 3)
    ),
    "fused gradients, ranks that share query groups": Job(
        f"{GROUPED} --bf16 --num-query-groups 2 --tensor-model-parallel-size 4 --zero-stage 3 "
        f"{FUSED}"
    ),
}
LARGE = {
    "Qwen3-30B-A3B, 64 GPUs": Job(
        f"{QWEN} --num-layers 48 --zero-stage 1 --global-batch-size 512", 64
    ),
    "tr11-176B": Job(
        f"{RUN} --preset tr11-176b --bf16 --micro-batch-size 2 --checkpoint-activations "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 "
        "--pp-partition-method type:transformer|embedding --global-batch-size 2048",
        384,
        (0, 5, 11),
    ),
    "tr8-104B": Job(
        f"{RUN} --preset tr8-104b --fp16 --micro-batch-size 1 --checkpoint-activations "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 32 "
        "--global-batch-size 2048",
        512,
        (0, 16, 31),
    ),
    "7B, one GPU": Job(f"{LLAMA} --num-layers 32", 1),
    "7B, ZeRO 1": Job(f"{LLAMA} --num-layers 32"),
    "7B, ZeRO 2": Job(f"{LLAMA} --num-layers 32 --zero-stage 2"),
    "7B, ZeRO 3": Job(f"{LLAMA} --num-layers 32 --zero-stage 3"),
    "7B, ZeRO 1, kept operators": Job(f"{LLAMA} --num-layers 32 {KEPT} matmul attention"),
    "7B, ZeRO 2, fused gradients": Job(f"{LLAMA} --num-layers 32 --zero-stage 2 {FUSED}"),
    "7B, interleaved": Job(
        f"{LLAMA} --num-layers 32 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2",
        8,
        (0, 2, 3),
    ),
    "7B, TP 8 PP 2": Job(
        f"{LLAMA} --num-layers 32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2",
        16,
        (0, 1),
    ),
    "7B in fp32, ZeRO 3": Job(f"{LLAMA.replace('--bf16', '')} --num-layers 32 --zero-stage 3"),
}


def check(job: Job, on_fake_gpu: Call) -> None:
    """Compare the tensors. Fake GPUs have no context and no libraries."""
    measured = on_fake_gpu(measure_peaks, job.flags, job.world_size, job.stages)
    loaded = load_config(job.flags.split())
    plan = resolve(loaded.config, job.world_size, loaded.origin)
    memory = predict_plan(plan, load_hardware("h100")).memory
    predicted = [memory[stage].total - memory[stage].fixed for stage in job.stages]
    assert predicted == pytest.approx(measured, rel=0.02)


ONCE_MORE = {
    "ZeRO 3",
    "GPipe",
    "recomputation, inputs in host memory",
    "large vocabulary",
    "kernels of blocks, grouped queries",
    "grouped queries, sliding window",
    "fp32, sharded, ALiBi",
    "shared sequences, core recomputed",
    "kept operators, sequence parallelism",
    "float8, ZeRO 1",
    "float8, one GPU, fused gradients",
    "experts, recomputed",
}
"""Jobs whose features others of `JOBS` or blocks of `test_blocks.py` have too."""


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=name, marks=pytest.mark.full if name in ONCE_MORE else ())
        for name, job in JOBS.items()
    ],
)
def test_predicted_tensors_are_those_of_a_step(job: Job, on_fake_gpu: Call):
    check(job, on_fake_gpu)


@pytest.mark.full
@pytest.mark.parametrize("job", MORE.values(), ids=MORE)
def test_predicted_tensors_of_kept_operators_and_fused_gradients(job: Job, on_fake_gpu: Call):
    check(job, on_fake_gpu)


@pytest.mark.full
@pytest.mark.parametrize("job", LARGE.values(), ids=LARGE)
def test_predicted_tensors_of_large_models(job: Job, on_fake_gpu: Call):
    check(job, on_fake_gpu)


def test_the_chunk_of_logits_is_that_of_the_loss():
    from megatron.model import loss

    assert LOGIT_CHUNK_BYTES == loss._CHUNK_BYTES_GPU
    assert LOGIT_TILE_ROWS == loss._TILE_ROWS
