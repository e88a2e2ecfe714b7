"""Published measurements of training steps, and what the cost model predicts for them.

The tables of docs/planner_errors.md are `docs/tables/planner_*.csv`. Tests compare them, and write
them with `UPDATE_GOLDEN=1`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from planner.other_trainers import OTHERS, SOFTWARE, OtherRounding, PaperMemory

from megatron.config.model import ModelConfig
from megatron.config.presets import read_preset
from megatron.console.preset_table import build_preset_shape
from megatron.extras.planner.cost import memory
from megatron.extras.planner.cost.hardware import Hardware, load_hardware
from megatron.extras.planner.cost.layout import Float8, RankLayout, Recompute, Software, StepJob
from megatron.extras.planner.cost.memory import BALANCED_ENDS, RankMemory
from megatron.extras.planner.cost.search import SearchSpace, search_layouts
from megatron.extras.planner.cost.step_prediction import StepPrediction
from megatron.model import flops
from megatron.model.shape import ModelShape

MORE_ROWS = Path(__file__).resolve().parents[1] / "fixtures" / "published_steps.json"
"""Rows that are not among the reference data."""

FITTED = {
    "Korthikanti-2022, 530B full": "gemm_share of the A100",
    "BLOOM-topology, 72 layers TP 4 PP 12 DP 8": "kernel_gap, memory outside of tensors",
    "Megatron-Core-0.8-H100, 177B": "gemm_share of the H100",
    "fms-fsdp-llama2, 7b A100": "contention",
    "torchtitan-llama3.1-H100, 8B FSDP 8 GPU": "gemm_share at 500 W, traffic of eager kernels",
    "torchtitan-A100, llama3-8b operators": "traffic of eager kernels",
    "GPT-2-V100, 39B batch 3072": "gemm_share of the V100",
}
"""Row -> the constants that were chosen on it. There is at most one for a table and hardware."""


@dataclass(frozen=True)
class Compared:
    """A published value and its prediction."""

    table: str
    row: str
    quantity: str
    published: float
    predicted: float
    layout: str

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1

    @property
    def key(self) -> str:
        """Name of the row."""
        return f"{self.table}, {self.row}"


def make_gpt(hidden: int, layers: int, heads: int, seq: int, vocab: int, **more: Any) -> ModelShape:
    config = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=seq,
        **more,
    )
    return ModelShape(config, vocab, vocab)


def make_row_shape(row: dict[str, Any], **more: Any) -> ModelShape:
    return make_gpt(
        row["hidden"], row["layers"], row["heads"], row["seq"], row.get("vocab", 51200), **more
    )


def make_llama(
    hidden: int, layers: int, heads: int, groups: int, ffn: int, seq: int, vocab: int
) -> ModelShape:
    return make_gpt(
        hidden,
        layers,
        heads,
        seq,
        vocab,
        num_query_groups=groups,
        ffn_hidden_size=ffn,
        glu_activation="swiglu",
        normalization="RMSNorm",
        add_bias_linear=False,
        position_embedding_type="rotary",
        untie_embeddings_and_output_weights=True,
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return rows


def estimate_memory(
    shape: ModelShape, layout: RankLayout, software: Software, batch: int
) -> tuple[RankMemory, ...]:
    """Return the memory of each pipeline rank, which does not depend on the device."""
    job = StepJob(shape, layout, batch, software, load_hardware("a100-80g"))
    return memory.estimate_memory(job)


def predict(
    shape: ModelShape, layout: RankLayout, batch: int, software: str, hardware: Hardware
) -> StepPrediction:
    return StepPrediction(StepJob(shape, layout, batch, SOFTWARE[software], hardware))


def search(space: SearchSpace) -> StepPrediction:
    """Return the fastest layout of what a row leaves open.

    It ran, so all of the memory may be used.
    """
    space = replace(space, hardware=replace(space.hardware, usable_share=1.0))
    found = search_layouts(space, count=1).fastest
    assert found, f"no layout of {space} fits"
    return found[0]


def compare_sc21(row: dict[str, Any]) -> Iterator[Compared]:
    best = search(
        SearchSpace(
            make_row_shape(row),
            row["batch"],
            row["gpus"],
            load_hardware("a100-80g"),
            SOFTWARE["megatron-lm-2021"],
            tensor=row["tp"],
            pipeline=row["pp"],
            recompute="full",
            zero_stage=0,
            partition="uniform",
        )
    )
    yield _compare_tflops(row, f"{row['parameters_billion']:g}B", best, hardware=True)


def _compare_tflops(
    row: dict[str, Any],
    name: str,
    best: StepPrediction,
    *,
    hardware: bool = False,
    causal: bool = False,
) -> Compared:
    predicted = best.compute_tflops(hardware=hardware, causal=causal)
    return Compared(
        row["table"], name, "TFLOPs", row["tflops_per_gpu"], predicted, best.job.layout.describe()
    )


def compare_korthikanti(row: dict[str, Any]) -> Iterator[Compared]:
    shape = make_row_shape(row)
    layout = RankLayout(
        tensor=row["tp"],
        pipeline=row["pp"],
        micro_batch=row["micro_batch"],
        virtual=row["interleave"],
        zero_stage=0,
    )
    for name, key, chosen in (
        ("full", "seconds_full_recompute", replace(layout, recompute="full")),
        (
            "selective + SP",
            "seconds_selective_sequence_parallel",
            replace(layout, recompute="selective", sequence_parallel=True),
        ),
    ):
        step = predict(shape, chosen, row["batch"], "megatron-lm-2022", load_hardware("a100-80g"))
        yield Compared(
            row["table"],
            f"{row['name']} {name}",
            "s",
            row[key],
            step.seconds,
            chosen.describe(),
        )


def compare_bloom(row: dict[str, Any]) -> Iterator[Compared]:
    # The 70-layer rows are the first with --pp-partition-method 'type:transformer|embedding' and
    # with the bf16 optimizer, as the chronicles say.
    bf16 = row["precision"] == "bf16"
    layout = RankLayout(
        tensor=row["tp"],
        pipeline=row["pp"],
        data=row["dp"],
        micro_batch=row["micro_batch"],
        recompute="full",
        zero_stage=row["zero"],
        partition=BALANCED_ENDS if bf16 else "uniform",
    )
    shape = make_row_shape(row, position_embedding_type="alibi")
    software = "megatron-deepspeed-bf16" if bf16 else "megatron-deepspeed"
    step = predict(shape, layout, row["batch"], software, load_hardware("jean-zay-a100"))
    name = f"{row['layers']} layers TP {row['tp']} PP {row['pp']} DP {row['dp']}"
    if row["heads"] != 64:
        name += f" {row['heads']} heads"
    yield Compared(row["table"], name, "s", row["seconds"], step.seconds, layout.describe())
    # nvidia-smi prints MiB, which the chronicles round to "GB".
    memory = step.peak_bytes / 2**30
    yield Compared(row["table"], name, "GiB", row["gb_per_gpu"], memory, layout.describe())


def compare_core(row: dict[str, Any]) -> Iterator[Compared]:
    # The sizes of the models are those with an untied output layer.
    shape = make_row_shape(row, untie_embeddings_and_output_weights=True)
    best = search(
        SearchSpace(
            shape,
            row["batch"],
            row["gpus"],
            load_hardware("h100"),
            SOFTWARE["megatron-core"],
            tensor=row["tp"],
            pipeline=row["pp"],
            zero_stage=1,
            partition="uniform",
        )
    )
    yield _compare_tflops(row, row["name"], best)


def compare_mt_nlg(row: dict[str, Any]) -> Iterator[Compared]:
    best = search(
        SearchSpace(
            make_row_shape(row),
            row["batch"],
            row["gpus"],
            load_hardware("a100-80g"),
            SOFTWARE["megatron-deepspeed"],
            tensor=row["tp"],
            pipeline=row["pp"],
            # DeepSpeed's pipeline has no virtual stages.
            virtual=1,
            recompute="full",
            zero_stage=1,
            partition="uniform",
        )
    )
    yield Compared(
        row["table"],
        f"{row['gpus']} GPUs",
        "s",
        row["seconds"],
        best.seconds,
        best.job.layout.describe(),
    )


FMS_NETWORK = {"a100": 6.25, "h100": 12.5}
"""GB/s of a device to other nodes. The nodes had 400 and 800 Gb/s
(https://pytorch.org/blog/maximizing-training/)."""


def compare_fms(row: dict[str, Any]) -> Iterator[Compared]:
    shapes = {
        "7b": make_llama(4096, 32, 32, 32, 11008, row["seq"], 32000),
        "34b": make_llama(8192, 48, 64, 8, 22016, row["seq"], 32000),
    }
    for kind, file in (("a100", "a100-80g"), ("h100", "h100")):
        hardware = replace(load_hardware(file), network_gb_per_second=FMS_NETWORK[kind])
        gpus = row[f"gpus_{kind}"]
        space = SearchSpace(
            shapes[row["model"]],
            row["micro_batch"] * gpus,
            gpus,
            hardware,
            SOFTWARE["fsdp-compiled"],
            tensor=1,
            pipeline=1,
            micro_batch=row["micro_batch"],
            zero_stage=3,
            # 7b keeps all activations; of larger models the share that is recomputed is not given.
            recompute="none" if row["model"] == "7b" else None,
            hsdp=row["model"] == "7b",
        )
        best = search(space)
        yield Compared(
            row["table"],
            f"{row['model']} {kind.upper()}",
            "tokens/s",
            row[f"tokens_per_second_per_gpu_{kind}"],
            best.tokens_per_second,
            best.job.layout.describe(),
        )


def compare_torchtitan(row: dict[str, Any]) -> Iterator[Compared]:
    shape = make_llama(4096, 32, 32, 8, 14336, row["seq"], 128256)
    layout = RankLayout(
        data=row["gpus"], micro_batch=row["micro_batch"], zero_stage=3, recompute="operators"
    )
    software = "fsdp-compiled" if "compile" in row["name"] else "fsdp-eager"
    batch = row["micro_batch"] * row["gpus"]
    step = predict(shape, layout, batch, software, load_hardware("h100-96g"))
    published = row["tokens_per_second_per_gpu"]
    chosen = layout.describe()
    yield Compared(row["table"], row["name"], "tokens/s", published, step.tokens_per_second, chosen)
    memory = step.peak_bytes / 2**30
    yield Compared(row["table"], row["name"], "GiB", row["gib"], memory, chosen)


LLAMAS = {
    "llama2-7b": (4096, 32, 32, 32, 11008),
    "llama2-13b": (5120, 40, 40, 40, 13824),
    "llama2-34b": (8192, 48, 64, 8, 22016),
    "llama2-70b": (8192, 80, 64, 8, 28672),
    "llama3-8b": (4096, 32, 32, 8, 14336),
    "llama3-70b": (8192, 80, 64, 8, 28672),
    "llama3-405b": (16384, 126, 128, 8, 53248),
}
"""Model -> hidden size, layers, heads, groups and feed-forward size."""


def compare_eager(row: dict[str, Any]) -> Iterator[Compared]:
    """Compare a run with FSDP and without torch.compile on A100."""
    model = row["model"]
    shape = make_llama(*LLAMAS[model], row["seq"], 128256 if "llama3" in model else 32000)
    hardware = load_hardware("a100-80g")
    software = SOFTWARE["fsdp-eager"]
    hsdp = False
    if row["table"] == "fms-fsdp-eager":
        hardware = replace(hardware, network_gb_per_second=FMS_NETWORK["a100"])
        # Its policy of mixed precision reduces in bf16.
        software = replace(software, gradient_bytes=2)
        hsdp = model == "llama2-7b"
    space = SearchSpace(
        shape,
        row["micro_batch"] * row["gpus"],
        row["gpus"],
        hardware,
        software,
        tensor=1,
        pipeline=1,
        micro_batch=row["micro_batch"],
        zero_stage=3,
        recompute=row["recompute"],
        hsdp=hsdp,
    )
    if row["recompute"] == "layer":
        # Every second layer is recomputed.
        layout = RankLayout(
            data=row["gpus"],
            micro_batch=row["micro_batch"],
            zero_stage=3,
            recompute="full",
            recomputed_share=Fraction(1, 2),
        )
        best = StepPrediction(StepJob(shape, layout, space.batch_size, software, hardware))
    else:
        best = search(space)
    yield Compared(
        row["table"],
        f"{model} {row['recompute']}",
        "tokens/s",
        row["tokens_per_second_per_gpu"],
        best.tokens_per_second,
        best.job.layout.describe(),
    )


def compare_v100(row: dict[str, Any]) -> Iterator[Compared]:
    # Nodes of Jean Zay: 4 V100 with four Omni-Path links of 100 Gb/s.
    hardware = replace(load_hardware("v100-32g"), ranks_per_node=4, network_gb_per_second=12.5)
    layout = RankLayout(
        tensor=row["tp"],
        pipeline=row["pp"],
        micro_batch=row["micro_batch"],
        recompute="full",
        zero_stage=0,
    )
    shape = make_row_shape(row)
    step = predict(shape, layout, row["batch"], "megatron-lm-2021", hardware)
    size = {48: "39B", 64: "52B"}[row["layers"]]
    name = f"{size} batch {row['batch']}"
    yield Compared(row["table"], name, "s", row["seconds"], step.seconds, layout.describe())


def compare_nemo(row: dict[str, Any]) -> Iterator[Compared]:
    shapes = {
        "llama3-8b": make_llama(4096, 32, 32, 8, 14336, 8192, 128256),
        "llama2-7b": make_llama(4096, 32, 32, 32, 11008, 4096, 32000),
    }
    published = row["tflops_per_gpu"] * 1e12 / row["tokens_per_second_per_gpu"]
    counted = flops.count_model_flops_per_token(shapes[row["model"]])
    yield Compared(
        row["table"], row["model"], "GFLOPs/token", published / 1e9, counted / 1e9, "any"
    )


def compare_llama3(row: dict[str, Any]) -> Iterator[Compared]:
    seq = 8192 if row["cp"] == 1 else 131072
    shape = make_llama(16384, 126, 128, 8, 53248, seq, 128256)
    best = search(
        SearchSpace(
            shape,
            # 16M tokens.
            2**24 // seq,
            row["gpus"],
            load_hardware("h100"),
            SOFTWARE["megatron-core"],
            tensor=row["tp"],
            pipeline=row["pp"],
            context=row["cp"],
            micro_batch=1,
            zero_stage=2,
            partition=BALANCED_ENDS,
        )
    )
    yield _compare_tflops(row, f"{row['gpus']} GPUs CP {row['cp']}", best, causal=True)


TITAN_FLOAT8 = Float8(
    rounding=OtherRounding(fused=True, scale_kernels=2, weights="shard", gathers_rounded=True),
    shares_scales=False,
)
"""torchao in torchtitan: compiled, with float8 gathers of FSDP and of tensor parallelism."""
CORE_FLOAT8 = Float8(
    rounding=OtherRounding(fused=True, scale_kernels=2, weights="step", keeps_rounded=True),
    shares_scales=False,
)
"""Transformer Engine, which rounds weights once a step, and inputs and gradients to both orders."""


# With tensor parallelism, a layer of torchtitan holds two gathered inputs in float8 and two partial
# sums of the input's gradient (`gathers`). The loss over a sharded vocabulary is not compiled.
# Its backward pass has four tensors in fp32: the logarithms of the probabilities, their
# exponentials, the gradient, and the sum of both.


def compare_float8_rows(rows: Sequence[dict[str, Any]]) -> list[Compared]:
    """Compare the runs of dense models with float8. No constant is fitted on them."""
    dense = [row for row in rows if row["precision"] != "BF16" and row["model"].startswith("Llama")]
    return [compared for row in dense for compared in _compare_float8(row)]


def _compare_float8(row: dict[str, Any]) -> Iterator[Compared]:
    titan = "torchtitan" in row["source"]
    several = row["pp"] > 1
    software = OTHERS["fsdp-compiled" if titan else "megatron-core"]
    software = replace(software, float8=TITAN_FLOAT8 if titan else CORE_FLOAT8)
    if titan and row["tp"] > 1:
        software = replace(software, memory=PaperMemory(gathers=3.0, logit_bytes=16))
    if "async TP" in row["note"]:
        # The share of messages that overlap with products is that of Megatron-Core.
        software = replace(software, hidden_tensor=OTHERS["megatron-core"].hidden_tensor)
    zero = 3 if row["fsdp"] else 1
    micro_batch = row["micro_batch"] if "micro_batch" in row else row["local_batch"]
    if titan and several:
        # By default a step has as many microbatches as stages. Weights stay gathered, and gradients
        # are reduced after the last microbatch.
        micro_batch //= row["pp"]
        zero = 1
    data = row["gpus"] // (row["tp"] * row["pp"] * row["cp"])
    layout = RankLayout(
        tensor=row["tp"],
        sequence_parallel=row["tp"] > 1,
        pipeline=row["pp"],
        context=row["cp"],
        data=data,
        micro_batch=micro_batch,
        virtual=row.get("vp") or 1,
        recompute=TITAN_RECOMPUTATION[row.get("recompute")],
        zero_stage=zero,
    )
    size = row["model"].split()[-1].lower()
    shape = make_llama(*LLAMAS[f"llama3-{size}"], row["seq"], 128256)
    batch = row["local_batch"] * data if titan else row["global_batch"]
    hardware = load_hardware("h100-96g" if titan else "h100")
    step = StepPrediction(StepJob(shape, layout, batch, software, hardware))
    table = "torchtitan" if titan else f"Megatron-Bridge {row['release']}"
    name = f"{size.upper()}, {row['gpus']} GPUs, {row['seq']:,} tokens"
    text = layout.describe()
    published = row["tokens_per_second_per_gpu"]
    yield Compared(table, name, "tokens/s", published, step.tokens_per_second, text)
    if titan:
        yield Compared(table, name, "GiB", row["memory_gib"], step.peak_bytes / 2**30, text)


def make_gpt_oss(layers: int, experts: int) -> ModelShape:
    """Return a gpt-oss without its attention sinks. Every second layer has a window."""
    return make_gpt(
        2880,
        layers,
        64,
        4096,
        201088,
        num_query_groups=8,
        kv_channels=64,
        ffn_hidden_size=2880,
        glu_activation="clamped_swiglu",
        normalization="RMSNorm",
        position_embedding_type="rotary",
        untie_embeddings_and_output_weights=True,
        sliding_window=128,
        full_attention_layers="1::2",
        num_experts=experts,
        moe_router_topk=4,
    )


AUTOMODEL = (
    # Model, GPUs, global batch, local batch, tokens/s of a GPU.
    ("Qwen3 30B-A3B", 8, 512, 4, 12040),
    ("gpt-oss 20B", 8, 256, 2, 13058),
)
"""NVIDIA-NeMo/Automodel docs/performance-summary.md of 2025-10-02: bf16, 4,096 tokens, balanced by
force. The ranks of the experts and recomputation are those of its examples/benchmark/configs."""

DEEPSEEK = (
    # Software, tokens/s of a GPU.
    ("fsdp-compiled", 651),
    ("fsdp-deepep", 859),
)
"""nebius/ml-cookbook pytorch-dsv3-mxfp8: torchtitan in bf16 on 256 B200, balanced by force. The
layout is that of its `train_671b.sh`, and the local batch of 64 is 64 microbatches. torchtitan has
two stages of unequal length on each rank, and the model has one."""
DEEPSEEK_OWN = (
    "DeepSeek 2024-12",
    "DeepSeek-V3, 2048 GPUs, 4,096 tokens",
    "PP 16 EP 64 ZeRO 1",
    f"{1e12 / (180_000 * 3600):.4g} tokens/s",
    "-",
    "not comparable: float8, DualPipe, H800",
)
"""180,000 hours for 10^12 tokens (https://arxiv.org/abs/2412.19437, section 1)."""


def compare_expert_rows(rows: Sequence[dict[str, Any]]) -> list[Compared]:
    """Compare the runs with experts in bf16. No constant is fitted on them."""
    shapes = {
        "Qwen3 30B-A3B": build_preset_shape(read_preset("qwen3-30b-a3b")),
        "gpt-oss 20B": make_gpt_oss(24, 32),
        "gpt-oss 120B": make_gpt_oss(36, 128),
        "DeepSeek-V3": build_preset_shape(read_preset("deepseek-v3")),
    }
    v3 = shapes["DeepSeek-V3"]
    shapes["DeepSeek-V3"] = replace(v3, config=replace(v3.config, seq_length=8192))
    found = []

    def compare(
        table: str,
        model: str,
        layout: RankLayout,
        batch: int,
        software: str,
        published: float,
        hardware: str = "h100",
    ) -> None:
        shape = shapes[model]
        step = predict(shape, layout, batch, software, load_hardware(hardware))
        row = f"{model}, {layout.ranks} GPUs, {shape.config.seq_length:,} tokens"
        found.append(
            Compared(table, row, "tokens/s", published, step.tokens_per_second, layout.describe())
        )

    for model, gpus, batch, local, published in AUTOMODEL:
        layout = RankLayout(data=gpus, micro_batch=local, zero_stage=3, expert=8, recompute="full")
        compare("AutoModel 2025-10", model, layout, batch, "fsdp-deepep", published)
    for each in rows:
        if each["ep"] > 1 and each["precision"] == "BF16":
            layout = RankLayout(
                pipeline=each["pp"],
                data=each["gpus"] // each["pp"],
                micro_batch=each["micro_batch"],
                expert=each["ep"],
            )
            compare(
                f"Megatron-Bridge {each['release']}",
                each["model"],
                layout,
                each["global_batch"],
                "megatron-bridge",
                each["tokens_per_second_per_gpu"],
            )
    layout = RankLayout(
        tensor=2, pipeline=2, data=64, sequence_parallel=True, expert=32, recompute="full"
    )
    for software, speed in DEEPSEEK:
        table = f"torchtitan 2026-03, {software.removeprefix('fsdp-')}"
        compare(table, "DeepSeek-V3", layout, 64 * layout.data, software, speed, "b200")
    return found


TITAN_RECOMPUTATION: dict[str | None, Recompute] = {
    "selective": "operators",
    "full": "full",
    None: "none",
}


COMPARISONS: dict[str, Callable[[dict[str, Any]], Iterator[Compared]]] = {
    "SC21-table1": compare_sc21,
    "Korthikanti-2022": compare_korthikanti,
    "BLOOM-topology": compare_bloom,
    "Megatron-Core-0.8-H100": compare_core,
    "MT-NLG-530B": compare_mt_nlg,
    "fms-fsdp-llama2": compare_fms,
    "torchtitan-llama3.1-H100": compare_torchtitan,
    "NeMo-24.12-H100-FP8": compare_nemo,
    "llama3-405b": compare_llama3,
    "torchtitan-A100": compare_eager,
    "fms-fsdp-eager": compare_eager,
    "GPT-2-V100": compare_v100,
}
"""Table of rows -> the function that compares one of its rows."""


def compare_all(rows: Sequence[dict[str, Any]]) -> list[Compared]:
    """Return all comparisons of time and memory."""
    return [
        compared
        for row in rows
        if row["table"] in COMPARISONS
        for compared in COMPARISONS[row["table"]](row)
    ]


def list_cells(compared: Sequence[Compared]) -> list[list[str]]:
    """Return the rows of a table of docs/planner_errors.md. Fitted rows are marked."""
    rows = [["table", "row", "layout", "published", "predicted", "error"]]
    for each in compared:
        mark = " (fitted)" if each.key in FITTED else ""
        published = f"{each.published:.4g} {each.quantity}"
        error = f"{100 * each.error:+.1f} %"
        cells = [f"{each.row}{mark}", each.layout, published, f"{each.predicted:.4g}", error]
        rows.append([each.table, *cells])
    return rows


def summarise(compared: Sequence[Compared]) -> str:
    """Return a sentence about the rows that nothing was fitted on."""
    held_out = [abs(each.error) for each in compared if each.key not in FITTED]
    return (
        f"Rows without a fitted constant: {len(held_out)}, mean absolute error "
        f"{100 * sum(held_out) / len(held_out):.1f} %, worst {100 * max(held_out):.1f} %."
    )
