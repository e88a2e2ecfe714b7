"""The kernels that a run uses without a flag, and what a resume keeps."""

import re
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from config.minimal import TRAINABLE
from test_plan import with_changes
from training.runs import Runner

from megatron.base.errors import ConfigError
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.manifest import MANIFEST
from megatron.config.kernels import SWITCHES, AttentionBackend, KernelsConfig
from megatron.config.normalise import read_argv
from megatron.engine.kind import EngineKind
from megatron.extras.interop.translators.translator import load_config
from megatron.extras.step.cuda_graph import find_shortest_recorded
from megatron.parallel.ranks import Ranks
from megatron.plan import kernel_choice
from megatron.plan.kernel_choice import CPU, KernelDevice, choose_kernels
from megatron.plan.resolve import resolve
from megatron.run.start.resume import choose_run_kernels
from megatron.run.state import TrainState
from megatron.schedule.curriculum import FOREVER, Curriculum

GPU = torch.device("cuda", 0)
CUDNN = ("fused", "flash", "efficient", "unfused")
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
HYBRID = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"}
LLAMA: dict[str, dict[str, Any]] = {
    "model": {"position_embedding_type": "rotary", "glu_activation": "swiglu"} | NO_DROPOUT,
    "precision": {"bf16": True},
}
ON: dict[str, Any] = dict.fromkeys(SWITCHES, True)
"""What a GPU uses."""
OFF: dict[str, Any] = dict.fromkeys(SWITCHES, False)
FLASH: tuple[AttentionBackend, ...] = ("flash",)
ROPE = {"rope_fusion": True}
OLD = KernelsConfig(attention_backend=("auto",), **OFF)
"""What an older version saved if no flag was given."""


def choose_on(
    gpu: str, obstacle: str = "", world_size: int = 1, **changes: dict[str, Any]
) -> dict[str, bool]:
    """Return which kernels a Llama in bf16 uses."""
    merged = {
        group: {**LLAMA.get(group, {}), **changes.get(group, {})} for group in {*LLAMA, *changes}
    }
    plan = resolve(with_changes(**merged), world_size)
    chosen = choose_kernels(plan, KernelDevice(gpu, obstacle)).kernels
    return {name: getattr(chosen, name) for name in SWITCHES}


@pytest.mark.parametrize(
    ("changes", "off"),
    [
        ({}, []),
        ({"precision": {"bf16": False}}, ["gradient_accumulation_fusion"]),
        ({"parallel": {"deepspeed": True}}, ["gradient_accumulation_fusion", "adamw_fusion"]),
        ({"optimizer": {"optimizer": "ademamix"}}, ["adamw_fusion"]),
        ({"precision": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}}, []),
        ({"precision": {"fp8_format": "e4m3", "fp8_recipe": "rowwise"}}, []),
        ({"model": {"position_embedding_type": "alibi"}}, ["rope_fusion"]),
        ({"model": {"glu_activation": None}}, ["bias_swiglu_fusion"]),
        ({"model": {"glu_activation": None, "activation": "squared_relu"}}, []),
        ({"model": {"norm_placement": "output"}}, ["residual_norm_fusion"]),
        ({"precision": {"fp32_residual_connection": True}}, ["residual_norm_fusion"]),
        (
            {"kernels": {"use_torch_compile": True}},
            ["rope_fusion", "bias_swiglu_fusion", "residual_norm_fusion"],
        ),
        ({"kernels": {"cross_entropy_loss_fusion": False}}, ["cross_entropy_loss_fusion"]),
    ],
    ids=str,
)
def test_a_gpu_uses_each_kernel_that_fits(changes: dict[str, Any], off: list[str]) -> None:
    assert choose_on("9.0", **changes) == ON | dict.fromkeys(off, False)


def test_the_flags_of_the_page_turn_all_kernels_off() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "kernels.md").read_text()
    flags = re.findall(r'OFF="([^"]*)"', page)[0].split()
    kernels = vars(load_config([*TRAINABLE, "--bf16", *flags]).config.kernels)
    plan = resolve(with_changes(**LLAMA, kernels=kernels), 1)
    chosen = choose_kernels(plan, KernelDevice("9.0")).kernels
    assert {name: getattr(chosen, name) for name in SWITCHES} == OFF
    assert chosen.attention_backend == ("auto",)
    assert chosen.cuda_graph == "off"
    assert not chosen.late_reading


def test_without_triton_or_a_gpu_only_flags_count() -> None:
    without = OFF | {"gradient_accumulation_fusion": True}
    assert choose_on("8.0", "Triton is not installed") == without
    assert choose_on("8.0", "Triton is not installed", kernels=ROPE) == without | ROPE
    assert choose_on(CPU) == OFF
    assert choose_on("rocm 9.4") == OFF
    assert choose_on(CPU, kernels=ON) == ON


@pytest.mark.parametrize(
    ("zero_stage", "batch", "on"),
    [(1, 16, True), (0, 16, True), (2, 16, False), (3, 16, False), (1, 8, False)],
)
def test_gradients_that_are_sent_at_once_are_not_added_up(
    zero_stage: int, batch: int, on: bool
) -> None:
    changes: dict[str, Any] = {
        "parallel": {"zero_stage": zero_stage},
        "batch": {"micro_batch_size": 4, "global_batch_size": batch},
    }
    expected = ON | {"gradient_accumulation_fusion": on}
    assert choose_on("9.0", world_size=2, **changes) == expected
    # A ramp-up may begin with one microbatch.
    changes["batch"]["rampup_batch_size"] = (8, 8, 100)
    if batch > 8:
        assert not choose_on("9.0", world_size=2, **changes)["gradient_accumulation_fusion"]
    assert choose_on("9.0", **changes) == ON


@pytest.mark.parametrize(
    ("gpu", "changes", "order"),
    [
        ("9.0", {}, CUDNN),
        ("8.0", {}, ("auto",)),
        (CPU, {}, ("auto",)),
        ("8.0 and 9.0", {}, ("auto",)),
        ("9.0", {"kernels": {"use_torch_compile": True}}, CUDNN),
        ("9.0", {"kernels": {"attention_backend": ("auto",)}}, ("auto",)),
        ("9.0", {"kernels": {"deterministic_mode": True}}, CUDNN[1:]),
        # cuDNN prepares a kernel for each length of a document.
        ("9.0", {"data": {"reset_attention_mask": True}}, CUDNN[1:]),
        ("9.0", {"kernels": {"use_varlen_attention": True}}, ("auto",)),
        # Their masks would depend on the layout.
        ("9.0", {"model": {"attention_dropout": 0.1}}, ("auto",)),
    ],
)
def test_the_order_of_attention_kernels(
    gpu: str, changes: dict[str, Any], order: tuple[str, ...]
) -> None:
    changes = {**changes, "model": NO_DROPOUT | changes.get("model", {})}
    chosen = choose_kernels(resolve(with_changes(**changes), 1), KernelDevice(gpu))
    assert chosen.kernels.attention_backend == order


CPU_OFFLOAD = {"checkpoint_activations": True, "checkpoint_in_cpu": True}


@pytest.mark.parametrize(
    ("changes", "ranks", "reason"),
    [
        ({}, 1, None),
        ({"kernels": {"use_torch_compile": True}}, 1, None),
        ({"kernels": {"cuda_graph": "off"}}, 1, "--cuda-graph off"),
        ({"model": {"hidden_dropout": 0.1, "attention_dropout": 0.1}}, 1, None),
        (
            {
                "model": {"attention_dropout": 0.1},
                "kernels": {"attention_backend": ("flash", "unfused")},
            },
            1,
            "draw masks",
        ),
        ({"model": {"num_experts": 4}}, 1, "expert"),
        ({"data": {"reset_attention_mask": True}}, 1, "documents"),
        ({"recompute": CPU_OFFLOAD}, 1, "host memory"),
        ({"parallel": {"deepspeed": True}}, 1, "DeepSpeed"),
        ({"kernels": {"cuda_graph": "on"}}, 2, "FSDP2"),
        ({"parallel": {"context_parallel_size": 2}}, 2, "FSDP2"),
        ({"parallel": {"pipeline_model_parallel_size": 2}}, 2, "pipeline"),
        ({"parallel": {"tensor_model_parallel_size": 2}}, 2, "several GPUs"),
        (
            {"parallel": {"tensor_model_parallel_size": 2}, "kernels": {"cuda_graph": "on"}},
            2,
            None,
        ),
        ({"model": HYBRID}, 1, "no GPU has recorded gated delta nets"),
        ({"model": HYBRID, "kernels": {"cuda_graph": "on"}}, 1, None),
    ],
)
def test_which_plans_have_graphs(changes: dict[str, Any], ranks: int, reason: str | None) -> None:
    changes = {**changes, "model": NO_DROPOUT | changes.get("model", {})}
    plan = resolve(with_changes(**changes), ranks)
    choice = choose_kernels(plan, KernelDevice("9.0"))
    assert choice.kernels.cuda_graph == ("on" if reason is None else "off")
    assert (reason or "repeated by the GPU") in choice.reasons["cuda_graph"]
    on_cpu = choose_kernels(plan, KernelDevice(CPU))
    assert on_cpu.kernels.cuda_graph == "off"
    # A run on CPUs that asks for nothing has no row.
    assert ("cuda_graph" in on_cpu.reasons) == ("cuda_graph" in changes.get("kernels", {}))
    assert choose_kernels(plan, KernelDevice("9.0", has_graphs=False)).kernels.cuda_graph == "off"
    assert choose_kernels(plan, KernelDevice("rocm")).kernels.cuda_graph == "off"


def test_the_longest_lengths_of_a_curriculum_have_graphs() -> None:
    growing = Curriculum("fixed_linear", 8, 256, total_curriculum_step=31, difficulty_step=8)
    assert find_shortest_recorded(growing, 1, 100) == 256 - 7 * 8
    assert find_shortest_recorded(growing, 1, FOREVER) == 256 - 7 * 8
    assert find_shortest_recorded(growing, 1, 2) == 16
    assert find_shortest_recorded(None, 1, 100) == 0


class FakeRanks:
    """Ranks whose others have GPUs of the given types, and obstacles."""

    def __init__(self, *others: tuple[str, str]) -> None:
        self.others = others

    def gather(self, mine: tuple[str, str]) -> list[tuple[str, str]]:
        return [mine, *self.others]


def start(
    state: TrainState,
    *others: tuple[str, str],
    capability: tuple[int, int] = (9, 0),
    saved: KernelsConfig | None = None,
    obstacle: str = "",
    changes: dict[str, Any] | None = None,
    **given: Any,
) -> tuple[dict[str, Any], list[str]]:
    """Return the kernels of a Llama in bf16 at a start of this rank, and the lines of the log."""
    lines: list[str] = []
    changes = changes or {}
    groups = {**LLAMA, "kernels": given}
    merged = {name: groups.get(name, {}) | changes.get(name, {}) for name in {*groups, *changes}}
    plan = resolve(with_changes(**merged), 1)
    ranks = typing.cast(Ranks, FakeRanks(*others))

    def load(device_type: str) -> Any:
        raise AssertionError

    kind = EngineKind("engine", load, find_kernel_obstacle=lambda device_type: obstacle)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        plan = choose_run_kernels(plan, state, saved, ranks, GPU, kind, lines.append)
    kernels = plan.config.kernels
    return {name: getattr(kernels, name) for name in ("attention_backend", *SWITCHES)}, lines


def resume(state: TrainState) -> TrainState:
    """Return the state as the next start reads it."""
    return TrainState.from_json({**state.to_json(), "iteration": 5})


NEW = {"attention_backend": CUDNN, **ON}
AS_BEFORE = {"attention_backend": ("auto",), **OFF}


def test_a_new_run_uses_all_kernels_and_a_resume_keeps_them() -> None:
    state = TrainState()
    assert start(state) == (NEW, [])
    state = resume(state)
    # A later version may choose otherwise. The run keeps its own kernels, and says so.
    with mock.patch.dict(kernel_choice._ATTENTION_ORDERS, {"9.0": ("flash", "unfused")}):
        found, lines = start(state, saved=KernelsConfig())
    assert found == NEW
    assert "kernels stay as in the checkpoint" in lines[0]
    assert "--attention-backend fused flash efficient unfused" in lines[0]
    assert "The default for a new run here is --attention-backend flash unfused" in lines[0]


def test_other_gpus_choose_again() -> None:
    state = TrainState()
    start(state)
    state = resume(state)
    found, lines = start(state, capability=(8, 0), saved=KernelsConfig())
    assert found == NEW | {"attention_backend": ("auto",)}
    assert "the checkpoint was trained on 9.0 and this run is on 8.0" in lines[0]
    _, lines = start(state, ("8.0", ""), saved=KernelsConfig())
    assert "this run is on 8.0 and 9.0" in lines[0]


@pytest.mark.parametrize(
    ("saved", "given", "used"),
    [
        (OLD, {}, AS_BEFORE),
        (replace(OLD, rope_fusion=True), {}, AS_BEFORE | ROPE),
        (replace(OLD, attention_backend=("by-gpu",)), {}, AS_BEFORE),
        (
            replace(OLD, attention_backend=("flash",)),
            {},
            AS_BEFORE | {"attention_backend": ("flash",)},
        ),
        (OLD, ON, AS_BEFORE | ON),
        (replace(OLD, rope_fusion=True), {"rope_fusion": False}, AS_BEFORE),
    ],
)
def test_a_checkpoint_without_a_record_keeps_what_its_flags_say(
    saved: KernelsConfig, given: dict[str, Any], used: dict[str, Any]
) -> None:
    state = TrainState(iteration=5)
    found, lines = start(state, saved=saved, **given)
    assert found == used
    assert "kernels stay as in the checkpoint" in lines[0]
    # The next start finds a record.
    assert start(resume(state), saved=KernelsConfig())[0] == used


def test_the_record_of_an_older_version_has_the_order_alone() -> None:
    values = TrainState(iteration=5).to_json()
    del values["kernels"]
    values["attention"] = {"gpu": "9.0", "kernels": list(CUDNN)}
    saved = replace(OLD, attention_backend=("by-gpu",))
    assert start(TrainState.from_json(values), saved=saved)[0] == NEW | OFF


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"kernels": {"deterministic_mode": True}}, "fused flash efficient unfused of the"),
        ({"kernels": {"use_varlen_attention": True}}, "fused flash efficient unfused of the"),
        ({"parallel": {"deepspeed": True}}, "--gradient-accumulation-fusion of the"),
        ({"precision": {"bf16": False}}, "--gradient-accumulation-fusion of the"),
    ],
)
def test_a_kernel_that_another_flag_excludes_is_not_kept(
    changes: dict[str, Any], refused: str
) -> None:
    state = TrainState()
    start(state)
    found, lines = start(resume(state), saved=KernelsConfig(), changes=changes)
    fresh, _ = start(TrainState(), changes=changes)
    assert found == fresh
    assert refused in lines[0]
    assert "is not kept" in lines[0]


@pytest.mark.parametrize(
    "record",
    [
        "x",
        {"kernels": {}},
        {"gpu": "9.0", "kernels": None},
        {"gpu": "9.0", "kernels": {"attention_backend": ["magic"]}},
        {"gpu": "9.0", "kernels": {"attention_backend": "auto"}},
        {"gpu": "9.0", "kernels": {"rope_fusion": "yes"}},
        {"gpu": "9.0", "kernels": {"another": True}},
    ],
    ids=str,
)
def test_a_record_that_is_not_valid_is_ignored(record: Any) -> None:
    state = TrainState(iteration=5, kernels=record)
    found, lines = start(state, saved=OLD)
    assert "record of kernels is not valid" in lines[0]
    assert found == AS_BEFORE
    older = TrainState(iteration=5).to_json() | {"attention": record}
    del older["kernels"]
    TrainState.from_json(older)


def test_fine_tuning_is_a_new_run() -> None:
    assert start(TrainState(), saved=OLD) == (NEW, [])


def test_one_rank_without_triton_leaves_its_kernels_out_on_all() -> None:
    state = TrainState()
    others = ("9.0", "Triton is not installed")
    expected = NEW | OFF | {"gradient_accumulation_fusion": True}
    assert start(state, others)[0] == expected
    # It also cannot keep what the checkpoint was trained with.
    state = TrainState()
    start(state)
    found, lines = start(resume(state), others, saved=KernelsConfig())
    assert found == expected
    assert lines[0] == (
        "warning: --rope-fusion of the checkpoint is not kept: Triton is not installed (rank 1)"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_has_the_choice(run: Runner, ranks: int) -> None:
    output = run("--exit-interval 2", ranks)
    assert "fused kernels " in output
    assert "a CPU has none" in output
    stored = open_checkpoint(run.folder, 2)
    kernels = {"attention_backend": ["auto"], **OFF}
    assert stored.state["kernels"] == {"gpu": "cpu", "kernels": kernels}
    assert stored.read_config().kernels == KernelsConfig()
    rewrite = {"gpu": "9.0", "kernels": {**ON, "attention_backend": list(CUDNN)}}
    manifest = replace(stored.manifest, state={**stored.state, "kernels": rewrite})
    (stored.folder / MANIFEST).write_text(manifest.dump_json())
    output = run("--exit-interval 4", ranks)
    assert "the checkpoint was trained on 9.0 and this run is on cpu" in output


def test_the_flags_and_their_values() -> None:
    def read(words: str) -> bool | None:
        line = read_argv(words.split())
        if line.errors:
            raise ConfigError("; ".join(line.errors))
        return typing.cast(bool | None, line.given["kernels.rope_fusion"].value)

    assert read("--rope-fusion") is True
    assert read("--rope-fusion on --lr 1") is True
    assert read("--rope-fusion=off") is False
    assert read("--no-rope-fusion --lr 1") is False
    assert read("--rope_fusion True") is True
    assert read("--no-rope-fusion --rope-fusion auto") is None
    with pytest.raises(ConfigError, match="--rope-fusion maybe must be auto, on or off"):
        read("--rope-fusion=maybe")
    with pytest.raises(ConfigError, match="--no-rope-fusion auto must be without a value"):
        read("--no-rope-fusion auto")
