"""Random command lines of valid runs, drawn from the flags."""

from hypothesis import strategies as st
from tiny_corpus import MERGES, VOCAB

_SWITCHES = (
    "--sequence-parallel",
    "--untie-embeddings-and-output-weights",
    "--no-add-bias-linear",
    "--embed-layernorm",
    "--parallel-residual",
    "--norm-placement output",
    "--normalization RMSNorm",
    "--goldfish-loss",
    "--eod-mask-loss",
    "--reset-position-ids",
    "--reset-attention-mask",
    "--z-loss-coefficient 1e-3",
    "--checkpoint-activations",
    "--checkpoint-activations --checkpoint-fraction 1/2",
    "--recompute-attention-core",
    "--no-weight-decay-on-embeddings",
    "--decoupled-lr 3e-3",
    "--clip-grad 0",
    "--loss-mean microbatch",
    "--async-save --save runs/random",
)
_CHOICES = (
    ("", "--position-embedding-type rotary", "--position-embedding-type alibi"),
    ("", "--glu-activation swiglu", "--activation squared_relu", "--activation xielu"),
    ("", "--num-query-groups 1", "--num-query-groups 4"),
    # A norm over all heads must be RMSNorm.
    ("", "--qk-norm head", "--qk-norm full --normalization RMSNorm"),
    ("", "--zero-stage 2", "--zero-stage 3", "--sharding-strategy ddp"),
    ("--hidden-dropout 0 --attention-dropout 0", ""),
    ("", "--optimizer ademamix", "--optimizer muon"),
    ("", "--lr-decay-style cosine", "--lr-decay-style constant"),
    ("", "--pp-partition-method type:transformer|embedding"),
    ("", "--sliding-window 16", "--sliding-window 16 --full-attention-layers 1::2"),
    (
        *("", "", "--num-experts 16 --expert-model-parallel-size 2 --moe-aux-loss-coeff 0.01"),
        "--num-experts 12 --expert-model-parallel-size 4 --moe-layer-freq 2 --moe-router-topk 3 "
        "--moe-router-pre-softmax --moe-z-loss-coeff 0.001",
        "--num-experts 8 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate",
    ),
    ("--make-vocab-size-divisible-by 96", "--make-vocab-size-divisible-by 1"),
)
_BATCHES = (
    "--global-batch-size 32 --train-iters 100",
    "--rampup-batch-size 16 16 640 --global-batch-size 64 --train-samples 6400",
    "--global-batch-size 32 --train-iters 100 --curriculum-schedule-type fixed_linear "
    "--curriculum-min-difficulty 16 --curriculum-total-step 20 --train-tokens 100000 "
    "--lr-decay-tokens 90000",
)
_GROUPS = (
    *((switch,) for switch in _SWITCHES),
    *(tuple(flags for flags in choices if flags) for choices in _CHOICES),
    *((flags,) for flags in _BATCHES[1:]),
    ("--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a"),
    ("--num-layers-per-virtual-pipeline-stage 1",),
    ("--bf16", "--fp16"),
)
"""Each group is a feature. The flags of a group exclude each other."""
_LAYOUTS = ((2, 1, 2), (1, 2, 2), (2, 2, 1), (2, 2, 2), (1, 4, 2), (2, 4, 1))
"""Tensor, pipeline and data parallel sizes of runs with three features."""


@st.composite
def draw_triple(draw: st.DrawFn) -> tuple[str, int]:
    """Return the flags of a run with three features, and its number of processes.

    Runs with many features have three more often than not, and an error of one may hide another's.
    """
    groups = draw(st.lists(st.sampled_from(_GROUPS), min_size=3, max_size=3, unique=True))
    tensor, pipeline, data = draw(st.sampled_from(_LAYOUTS))
    features = [draw(st.sampled_from(group)) for group in groups]
    flags = [
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
        f"--num-layers 8 --seed {draw(st.integers(0, 10_000))}",
        f"--vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000",
        *features,
    ]
    if not set(features).intersection(_BATCHES):
        flags.append(_BATCHES[0])
    context = 2 if any("--context-parallel-size" in text for text in features) else 1
    return " ".join(flags), tensor * pipeline * data * context


_EXPERT_GROUPS = (
    ("--moe-router-topk 1 --moe-router-pre-softmax", "--moe-router-topk 3", ""),
    (
        "",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 4",
    ),
    (
        "--moe-aux-loss-coeff 0.01",
        "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type seq_aux_loss",
        "--moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type global_aux_loss",
        "--moe-z-loss-coeff 0.001",
    ),
    ("", "--moe-layer-freq 2", "--moe-layer-freq ([0]*1+[1]*7)"),
    ("", "--moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate", "--add-mlp-bias"),
    ("", "--zero-stage 0", "--zero-stage 2", "--zero-stage 3", "--sharding-strategy hsdp"),
)
"""Choices of runs with experts."""


@st.composite
def draw_expert_run(draw: st.DrawFn) -> tuple[str, int]:
    """Return the flags of a run with experts, which ranks divide, and its number of processes."""
    tensor, pipeline, context = (draw(st.sampled_from((1, 1, 2))) for _ in range(3))
    data = draw(st.sampled_from((2, 4, 8)))
    ranks = tensor * context * data
    experts = draw(st.sampled_from([n for n in (2, 4, 8) if n <= ranks]))
    features = [draw(st.sampled_from(choices)) for choices in _EXPERT_GROUPS]
    if "hsdp" in features[-1]:
        features.append(f"--hsdp-shard-size {draw(st.sampled_from((2, data // 2)))}")
    features += draw(st.lists(st.sampled_from(_SWITCHES), unique=True, max_size=2))
    flags = [
        f"--num-experts 16 --expert-model-parallel-size {experts}",
        f"--context-parallel-size {context}",
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
        f"--num-layers 8 --micro-batch-size 1 --seed {draw(st.integers(0, 10_000))}",
        f"--vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000",
        draw(st.sampled_from(_BATCHES)),
        draw(st.sampled_from(("", "--cp-comm-type a2a", "--optimizer muon"))),
        *features,
    ]
    return " ".join(flags), ranks * pipeline


@st.composite
def draw_run(draw: st.DrawFn) -> tuple[str, int]:
    """Return the flags of a run and its number of processes. Some combinations are invalid."""
    tensor = draw(st.sampled_from((1, 2, 4)))
    pipeline = draw(st.sampled_from((1, 2, 4)))
    data = draw(st.sampled_from((1, 2, 4)))
    context = draw(st.sampled_from((1, 1, 2, 4)))
    flags = [
        f"--context-parallel-size {context} {draw(st.sampled_from(('', '--cp-comm-type a2a')))}",
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline}",
        f"--num-layers {draw(st.sampled_from((4, 7, 8, 12)))} --micro-batch-size "
        f"{draw(st.sampled_from((1, 2)))}",
        draw(st.sampled_from(_BATCHES)),
        f"--vocab-file {VOCAB} --merge-file {MERGES} --vocab-size 5000",
        f"--seed {draw(st.integers(0, 10_000))}",
        *(draw(st.sampled_from(choices)) for choices in _CHOICES),
        *draw(st.lists(st.sampled_from(_SWITCHES), unique=True, max_size=7)),
    ]
    if pipeline > 1 and draw(st.booleans()):
        flags.append("--num-layers-per-virtual-pipeline-stage 1")
    return " ".join(flags), tensor * pipeline * data * context
