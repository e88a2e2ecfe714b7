"""Steps on the fake GPU: what the host waits for, and every message against a formula."""

from collections import Counter
from dataclasses import replace

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import (
    Case,
    count_attention,
    count_attention_of_first_call,
    count_operators,
    run_case,
)
from cuda.formulas import Layout, Messages, predict

from megatron.base.errors import TrainingError
from megatron.extras.planner.dry_run.record import RankReport

BF16 = "--bf16 "
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 16 --position-embedding-type rotary --no-add-bias-linear "
)
LLAMA = (
    "--position-embedding-type rotary --normalization RMSNorm --glu-activation swiglu "
    "--no-add-bias-linear --untie-embeddings-and-output-weights "
)
FIRST_CALL = Counter({"_scaled_dot_product_efficient_attention": 1})
"""The call of a single token in fp32 that comes before an order of kernels is used."""
VARLEN = (
    "--reset-attention-mask --use-varlen-attention --global-batch-size 8 "
    "--vocab-file vocab.json --merge-file merges.txt "
)
"""Flags for documents. A plan with the size of the vocabulary does not read the two files."""
FORMULAS = {
    "one GPU": (Case(BF16 + "--global-batch-size 8"), Layout(m=4)),
    "TP": (
        Case(BF16 + "--tensor-model-parallel-size 2 --global-batch-size 4", 2, 1),
        Layout(t=2),
    ),
    "TP 4, fp32": (
        Case("--tensor-model-parallel-size 4 --global-batch-size 4", 4, 3),
        Layout(t=4, dtype="float32"),
    ),
    "TP, recomputed": (
        Case(
            BF16 + "--tensor-model-parallel-size 2 --checkpoint-activations --global-batch-size 4",
            2,
        ),
        Layout(t=2, recomputed=True),
    ),
    "SP, ZeRO 1, fp16": (
        Case(
            "--fp16 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 "
            "--hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 16",
            8,
            5,
        ),
        Layout(t=2, d=4, sequence=True, dtype="float16"),
    ),
    "ZeRO 1 over 3 ranks": (
        Case(BF16 + "--zero-stage 1 --global-batch-size 18", 3, 2),
        Layout(d=3, m=3),
    ),
    "ZeRO 2": (
        Case(BF16 + "--zero-stage 2 --global-batch-size 24", 4, 3),
        Layout(d=4, m=3, zero=2),
    ),
    "ZeRO 3, TP": (
        Case(
            BF16 + "--zero-stage 3 --tensor-model-parallel-size 2 --global-batch-size 16",
            8,
            7,
        ),
        Layout(t=2, d=4, zero=3),
    ),
    "ZeRO 3, untied": (
        Case(
            BF16 + "--zero-stage 3 --untie-embeddings-and-output-weights --global-batch-size 16",
            4,
            1,
        ),
        Layout(d=4, zero=3, untied=True),
    ),
    "HSDP, 4 copies": (
        Case(BF16 + "--sharding-strategy hsdp --global-batch-size 48", 8, 6, ranks_per_node=2),
        # This strategy is ZeRO 3 inside of a copy.
        Layout(d=8, m=3, copies=4, group="shards", zero=3),
    ),
    "DDP": (
        Case(BF16 + "--sharding-strategy ddp --global-batch-size 16", 4, 1),
        Layout(d=4, copies=4),
    ),
}
PIPELINE = (
    BF16 + "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 "
    "--checkpoint-activations --global-batch-size 64"
)
FORMULAS |= {
    f"1F1B, stage {stage}": (
        Case(PIPELINE, 32, rank),
        Layout(t=2, d=4, p=4, m=8, layers=1, first=stage == 0, last=stage == 3, recomputed=True),
    )
    for stage, rank in ((0, 0), (1, 13), (3, 31))
}
FORMULAS |= {
    "1,024 ranks": (
        Case(
            BF16 + "--num-layers 4 --num-attention-heads 8 --tensor-model-parallel-size 8 "
            "--pipeline-model-parallel-size 4 --sequence-parallel --zero-stage 1 "
            "--global-batch-size 256",
            1024,
            1023,
        ),
        Layout(t=8, d=32, p=4, m=4, layers=1, first=False, sequence=True),
    ),
}
OTHERS = {
    "interleaved": Case(
        BF16 + "--num-layers 8 --pipeline-model-parallel-size 4 --global-batch-size 32 "
        "--num-layers-per-virtual-pipeline-stage 1",
        8,
        5,
    ),
    "Llama, GQA, ZeRO 3": Case(
        BF16 + LLAMA + "--num-query-groups 2 --zero-stage 3 --global-batch-size 16", 4, 2
    ),
    "ALiBi": Case(BF16 + "--position-embedding-type alibi --global-batch-size 8"),
    "ALiBi, documents": Case(
        BF16 + "--position-embedding-type alibi --global-batch-size 4", documents=True
    ),
    "rotary, documents, fp32": Case(
        LLAMA + "--global-batch-size 4 --log-num-zeros-in-grad", documents=True
    ),
    "varlen attention, GQA, SP, recomputed": Case(
        BF16 + LLAMA + "--num-query-groups 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--checkpoint-activations --checkpoint-keep-operators attention " + VARLEN,
        2,
        1,
        documents=True,
    ),
    "varlen attention, fp16, sliding window, ZeRO 2": Case(
        "--fp16 --zero-stage 2 --sliding-window 8 --full-attention-layers 1::2 "
        "--recompute-attention-core " + VARLEN,
        2,
        documents=True,
    ),
    "varlen attention, 1F1B": Case(
        BF16 + "--num-layers 4 --pipeline-model-parallel-size 2 " + VARLEN, 2, 1, documents=True
    ),
    "fused gradients, 1F1B, fp16": Case(
        "--fp16 --num-layers 4 --pipeline-model-parallel-size 2 --gradient-accumulation-fusion "
        "--global-batch-size 16",
        4,
        3,
    ),
    "input kept in host memory": Case(
        "--fp16 --tensor-model-parallel-size 2 --checkpoint-activations --partition-activations "
        "--checkpoint-in-cpu --hidden-dropout 0.1 --attention-dropout 0.1 --global-batch-size 4",
        2,
        1,
    ),
    "Muon": Case(
        BF16 + LLAMA + "--optimizer muon --tensor-model-parallel-size 2 --global-batch-size 8", 4, 3
    ),
}


def count_messages(report: RankReport) -> Messages:
    """Return the messages of a step, whatever stream they were on."""
    found: Messages = Counter()
    for each, count in report.step.collectives.items():
        found[each.kind, each.group, each.dtype, each.size] += count
    return found


def check_waits(report: RankReport) -> None:
    """Check that the host waits once, for the loss and the norm, however many microbatches."""
    waits = report.step.synchronisations
    assert sum(waits.values()) == 1, waits
    (wait,) = waits
    assert wait.cause == "blocking copy to the host"
    assert wait.line.startswith("engine/native.py")
    blocking = [each for each in report.step.copies if each.blocking]
    assert [each.direction for each in blocking] == ["to the host"], blocking


@pytest.mark.parametrize("name", FORMULAS)
def test_messages_are_those_of_the_formula_and_the_host_waits_once(name, on_fake_gpu: Call):
    case, layout = FORMULAS[name]
    report = on_fake_gpu(run_case, case)
    assert report.microbatches == layout.m
    assert count_messages(report) == predict(layout)
    check_waits(report)


@pytest.mark.parametrize("name", ["one GPU", "1F1B, stage 1"])
def test_only_tokens_labels_and_dropout_keys_are_copied_to_the_gpu(name, on_fake_gpu: Call):
    case, layout = FORMULAS[name]
    copies = on_fake_gpu(run_case, case).step.copies
    # int64[b, s] with b = 2 and s = 32, for the ids and for the labels of each microbatch, and
    # int64[m, 3] for the keys of dropout: the seed, the iteration and the first sample.
    assert {
        (each.size, each.blocking): count
        for each, count in copies.items()
        if each.direction == "to the GPU"
    } == {(8 * 2 * 32, False): 2 * layout.m, (8 * layout.m * 3, False): 1}


@pytest.mark.parametrize("name", OTHERS)
def test_the_host_waits_once_a_step(name, on_fake_gpu: Call):
    # The first step builds the tables of positions.
    check_waits(on_fake_gpu(run_case, replace(OTHERS[name], steps=2)))


def test_one_kernel_computes_the_attention_of_all_documents(on_fake_gpu: Call):
    """Each layer calls it once a microbatch, and once more if its core is computed again."""
    kept = OTHERS["varlen attention, GQA, SP, recomputed"]
    # 4 microbatches of 2 layers. Their results are kept, although the layers are recomputed.
    assert on_fake_gpu(count_attention, kept) == {"_varlen_attn": 8, "_varlen_attn_backward": 8}
    again = OTHERS["varlen attention, fp16, sliding window, ZeRO 2"]
    # 2 microbatches of 2 layers.
    counts = on_fake_gpu(count_attention, again)
    assert (counts["_varlen_attn"], counts["_varlen_attn_backward"]) == (8, 4)
    latent = Case(BF16 + LATENT + VARLEN, documents=True)
    assert on_fake_gpu(count_attention, latent) == {"_varlen_attn": 8, "_varlen_attn_backward": 8}


@pytest.mark.parametrize(
    ("backends", "flags", "kernel"),
    [
        ("auto", BF16, "flash"),
        ("fused flash efficient unfused", BF16, "cudnn"),
        pytest.param("efficient flash", BF16, "efficient", marks=pytest.mark.full),
        ("flash fused", BF16 + "--position-embedding-type alibi", "cudnn"),
        ("fused efficient", "", "efficient"),
        # Zeros make values as wide as keys only if flash is the first choice.
        ("flash", BF16 + LATENT, "flash"),
        pytest.param("auto", BF16 + LATENT, "efficient", marks=pytest.mark.full),
    ],
)
def test_attention_takes_the_first_possible_kernel(
    backends: str, flags: str, kernel: str, on_fake_gpu: Call
):
    name = f"_scaled_dot_product_{kernel}_attention"
    case = Case(
        f"{flags} --attention-backend {backends} --checkpoint-activations --global-batch-size 2"
    )
    # The start tries a choice that may be impossible.
    tried = backends != "auto" and "unfused" not in backends
    # Each of the two layers computes its attention again.
    expected = Counter({name: 4 + tried, f"{name}_backward": 2})
    if backends != "auto":
        expected += FIRST_CALL
    assert on_fake_gpu(count_attention, case) == expected
    check_waits(on_fake_gpu(run_case, replace(case, steps=2)))


@pytest.mark.parametrize(
    ("backends", "kernel", "compiled"),
    [
        ("flash fused", "flash", ""),
        ("fused flash efficient unfused", "cudnn", " --use-torch-compile"),
        pytest.param("flash fused", "flash", " --use-torch-compile", marks=pytest.mark.full),
        pytest.param("fused flash efficient unfused", "cudnn", "", marks=pytest.mark.full),
    ],
)
def test_the_first_call_of_a_process_takes_the_chosen_kernel(
    backends: str, kernel: str, compiled: str, on_fake_gpu: Call
):
    name = f"_scaled_dot_product_{kernel}_attention"
    case = Case(f"{BF16}--attention-backend {backends} --global-batch-size 2{compiled}")
    tried = "unfused" not in backends
    expected = Counter({name: 2 + tried, f"{name}_backward": 2}) + FIRST_CALL
    assert on_fake_gpu(count_attention_of_first_call, case) == expected


def test_attention_without_fusion(on_fake_gpu: Call):
    case = Case("--bf16 --attention-backend unfused --global-batch-size 2")
    assert set(on_fake_gpu(count_attention, case)) == {"_safe_softmax", *FIRST_CALL}


@pytest.mark.parametrize("flags", ["--sliding-window 4 --full-attention-layers 1", VARLEN])
def test_sinks_take_the_kernel_that_returns_its_logsumexp(flags: str, on_fake_gpu: Call):
    flags = f"{BF16}--softmax-type learnable {flags} --global-batch-size 2"
    case = Case(flags, documents="varlen" in flags)
    found = on_fake_gpu(count_attention, case)
    # One call for each of the two layers, also with several documents.
    assert {name: found[name] for name in found if "flash" in name} == {
        "_flash_attention_forward": 2,
        "_flash_attention_backward": 2,
    }
    assert "_safe_softmax" not in found


def test_an_impossible_kernel_is_refused_at_the_start(on_fake_gpu: Call):
    case = Case("--attention-backend flash --global-batch-size 2")
    with pytest.raises(TrainingError, match=r"--attention-backend flash: none of these kernels"):
        on_fake_gpu(run_case, case)


@pytest.mark.parametrize(
    ("flags", "world_size", "microbatches"),
    [
        pytest.param("", 1, 4, marks=pytest.mark.full),
        ("--tensor-model-parallel-size 2 --sequence-parallel --checkpoint-activations", 2, 4),
        # A backward pass of these sends its gradients away, so each begins with new ones.
        pytest.param("--zero-stage 2", 2, 1, marks=pytest.mark.full),
        ("--zero-stage 3 --checkpoint-activations", 2, 1),
    ],
    ids=["one GPU", "SP, recomputed", "ZeRO 2", "ZeRO 3, recomputed"],
)
def test_products_add_to_the_gradients(
    flags: str, world_size: int, microbatches: int, on_fake_gpu: Call
):
    """Each weight's first product makes its gradient, and the others add to it."""
    case = Case(
        f"{BF16}{LLAMA}{flags} --gradient-accumulation-fusion --global-batch-size 8", world_size, 0
    )
    counts = on_fake_gpu(count_operators, case)
    # Queries, output, gate, up and down of two layers.
    weights = 2 * 5
    steps = 8 // 2 // (world_size if "zero" in flags else 1)
    passes = steps // microbatches
    # The gradient of the output matrix is rounded to 16 bits.
    assert counts["mm.dtype"] == weights * passes
    assert counts.get("addmm.dtype_out", 0) == weights * (steps - passes)
    check_waits(on_fake_gpu(run_case, replace(case, steps=2)))


def test_fused_gradients_need_no_more_memory(on_fake_gpu: Call):
    flags = BF16 + LLAMA + "--global-batch-size 8 --hidden-size 512 --gradient-accumulation-fusion "
    plain, fused = (
        on_fake_gpu(run_case, Case(flags + more, steps=2))
        for more in ("--no-gradient-accumulation-fusion", "")
    )
    assert fused.step.peak_bytes <= plain.step.peak_bytes
    assert fused.step.peak["gradients"] == plain.step.peak["gradients"]
