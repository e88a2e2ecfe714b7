"""The kernels that a configuration leaves to the trainer, for a type of device.

A flag that names a kernel is kept. Each other kernel is on unless `_find_obstacle` has a reason
against it. The choice is a function of the plan and of what all ranks have in common, so that all
ranks make the same one. See docs/decisions/056.

The first functions choose the plans whose microbatches are recorded as CUDA graphs, for
--cuda-graph. A graph repeats the same kernels with the same memory. So nothing in a microbatch may
depend on a number that the host reads, or that the host passes to a kernel in each microbatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from megatron.config.fields import all_fields
from megatron.config.kernels import FUSED_ATTENTION, SWITCHES, AttentionBackend, KernelsConfig
from megatron.config.tree import Config
from megatron.model.layer_parts import get_activation
from megatron.plan.run_plan import Plan


def find_graph_obstacle(plan: Plan) -> str | None:
    """Return why microbatches of a plan are never recorded, or None if they can be."""
    config = plan.config
    obstacles = {
        "attention kernels draw masks from a generator of the host": (
            config.model.attention_dropout > 0 and config.kernels.names_fused_attention
        ),
        "DeepSpeed runs the passes": config.parallel.deepspeed,
        "the stages of a pipeline send messages": plan.pipeline_size > 1,
        "several ranks share the weights, which FSDP2 gathers": plan.weight_ranks > 1,
        "each expert gets another number of tokens": config.model.num_experts is not None,
        "gated delta nets were not recorded": "gated_delta_net" in config.model.attention_kinds,
        "latent attention was not recorded": "latent" in config.model.attention_kinds,
        "the number of documents differs": config.data.reset_attention_mask,
        "--checkpoint-in-cpu copies to host memory": config.recompute.checkpoint_in_cpu,
    }
    return next((reason for reason, found in obstacles.items() if found), None)


def find_default_obstacle(plan: Plan) -> str | None:
    """Return why --cuda-graph auto does not record microbatches of a plan, or None if it does."""
    reason = find_graph_obstacle(plan)
    if reason is None and plan.world_size > 1:
        return "graphs with messages between ranks have not run on several GPUs"
    return reason


def runs_eager_passes(config: Config) -> bool:
    """Return whether some iterations run backward passes that hooks watch, beside graphs."""
    return bool(config.parallel.replay_interval or config.logging.log_layer_stats_interval)


CPU = "cpu"
ROCM = "rocm"
_TORCH_ORDER: tuple[AttentionBackend, ...] = ("auto",)
_ATTENTION_ORDERS: dict[str, tuple[AttentionBackend, ...]] = {
    "9.0": ("fused", "flash", "efficient", "unfused")
}
"""Compute capability -> order of attention kernels. All other types have PyTorch's."""
_COMPILED = "torch.compile fuses it with its neighbours"
_NEVER_COMPILED = ("cross_entropy_loss_fusion", "adamw_fusion")


@dataclass(frozen=True)
class KernelDevice:
    """The type of the GPUs, and what keeps a rank from running Triton."""

    gpu: str
    """Compute capability, as in 9.0. Ranks of several types have all of them. A CPU is "cpu", and
    a GPU of AMD is "rocm"."""
    obstacle: str = ""
    """Why a rank cannot run the Triton kernels. Empty: all ranks can."""
    has_graphs: bool = True
    """Whether the engine can record microbatches as CUDA graphs."""


@dataclass(frozen=True)
class KernelChoice:
    """A configuration of kernels in which nothing is left to the trainer."""

    kernels: KernelsConfig
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Setting -> why it is on or off. A setting without a meaning for the model is left out."""


def choose_kernels(plan: Plan, device: KernelDevice) -> KernelChoice:
    """Return the kernels of a plan on a type of device."""
    config = plan.config
    kernels = config.kernels
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for name in SWITCHES:
        given = getattr(kernels, name)
        obstacle = _find_obstacle(name, plan, device)
        values[name] = given
        if given is not None:
            reasons[name] = all_fields()[f"kernels.{name}"].spell(given)
            continue
        values[name] = obstacle is None
        if obstacle != "":
            reasons[name] = obstacle or "the default on a GPU"
    if kernels.attention_backend == ("by-gpu",):
        values["attention_backend"] = _choose_attention_order(config, device)
        reasons["attention_backend"] = f"the default on compute capability {device.gpu}"
    obstacle = _find_obstacle_of_graphs(plan, device)
    # A run records what was decided, so `auto` does not remain.
    values["cuda_graph"] = "on" if obstacle is None else "off"
    if obstacle is None:
        reasons["cuda_graph"] = "recorded in the second step, then repeated by the GPU"
    # The table of a run on CPUs has no row, unless the flag is given.
    elif (device.gpu, kernels.cuda_graph) != (CPU, "auto"):
        reasons["cuda_graph"] = obstacle
    return KernelChoice(replace(kernels, **values), reasons)


def apply_kernel_choice(plan: Plan, choice: KernelChoice) -> Plan:
    """Return the plan with chosen kernels."""
    config = replace(plan.config, kernels=choice.kernels)
    return replace(plan, config=config, kernel_reasons=choice.reasons)


def explain_refusal(name: str, used: Any, plan: Plan, device: KernelDevice) -> str | None:
    """Return why a run cannot keep a kernel of its checkpoint, or None if it can.

    Args:
        name: A setting of kernels.
        used: Its value in the checkpoint.
        plan: The plan of the run.
        device: What all ranks have in common.
    """
    kernels = plan.config.kernels
    if name == "attention_backend":
        if kernels.use_varlen_attention:
            return "--use-varlen-attention has a kernel of its own"
        if plan.config.model.attention_dropout > 0 and set(used) & FUSED_ATTENTION:
            return "its kernels would draw dropout masks that depend on the layout"
        if kernels.deterministic_mode and "fused" in used:
            return "--deterministic-mode leaves out fused"
        if kernels.use_torch_compile and used == ("unfused",):
            return "--use-torch-compile may replace unfused attention"
        return None
    if not used:
        return None
    if name == "adamw_fusion" and plan.config.parallel.deepspeed:
        return "DeepSpeed updates the weights"
    if name != "gradient_accumulation_fusion":
        return device.obstacle or None
    reason = _find_obstacle_of_sums(plan)
    return "it needs --bf16 or --fp16" if reason == "" else reason


def _find_obstacle(name: str, plan: Plan, device: KernelDevice) -> str | None:
    """Return why a kernel is not used by default, or None if it is used.

    The reason is empty if the model has nothing that the kernel computes.
    """
    config = plan.config
    if not has_use(name, plan):
        return ""
    if device.gpu == CPU:
        return "a CPU has none"
    if ROCM in device.gpu:
        return "never tried on a GPU of AMD"
    if name == "gradient_accumulation_fusion":
        return _find_obstacle_of_sums(plan)
    if device.obstacle:
        return device.obstacle
    if config.kernels.use_torch_compile and name not in _NEVER_COMPILED:
        return _COMPILED
    return None


def has_use(name: str, plan: Plan) -> bool:
    """Return whether a run has something that a kernel computes."""
    config = plan.config
    absent = {
        "rope_fusion": not plan.shape.rotary_dim or plan.shape.attention != "dot_product",
        "bias_swiglu_fusion": not get_activation(config.model).has_kernel,
        "residual_norm_fusion": not config.model.has_norms_first
        or config.model.apply_layernorm_1p
        or config.precision.fp32_residual_connection,
        "adamw_fusion": config.optimizer.optimizer != "adam" or config.parallel.deepspeed,
    }
    return not absent.get(name)


def _find_obstacle_of_sums(plan: Plan) -> str | None:
    """Return why products do not add to the gradients by default, or None."""
    precision = plan.config.precision
    if not (precision.bf16 or precision.fp16):
        return ""
    if plan.config.parallel.deepspeed:
        return "DeepSpeed takes the gradients from autograd"
    # Gradients of one microbatch are sent and freed. FSDP2 holds those of a layer until then,
    # and fp32 would need twice the memory and more traffic than a conversion.
    smallest = min(plan.batch_size.get_size(0, 0), plan.batch_size.final)
    once = smallest <= plan.config.batch.micro_batch_size * plan.data_parallel_size
    if plan.weight_ranks > 1 and (once or plan.zero_stage > 1):
        return "gradients are sent after each microbatch"
    return None


def _find_obstacle_of_graphs(plan: Plan, device: KernelDevice) -> str | None:
    """Return why no microbatch is recorded as a CUDA graph, or None if they are."""
    given = plan.config.kernels.cuda_graph
    if given == "off":
        return "--cuda-graph off"
    if device.gpu == CPU:
        return "a CPU has none"
    if ROCM in device.gpu:
        return "never tried on a GPU of AMD"
    match given:
        case "on":
            reason = find_graph_obstacle(plan)
        case "auto":
            reason = find_default_obstacle(plan)
        case _:
            assert_never(given)
    if reason is None and not device.has_graphs:
        return "megatron.extras.step.cuda_graph is not installed"
    return reason


def _choose_attention_order(config: Config, device: KernelDevice) -> tuple[AttentionBackend, ...]:
    """Return what --attention-backend by-gpu means."""
    kernels = config.kernels
    # Kernels would draw dropout masks that depend on the layout.
    if kernels.use_varlen_attention or config.model.attention_dropout > 0:
        return _TORCH_ORDER
    order = _ATTENTION_ORDERS.get(device.gpu, _TORCH_ORDER)
    if config.data.reset_attention_mask or kernels.deterministic_mode:
        # cuDNN prepares its kernel for each length, and each document may have another one. Its
        # backward pass does not repeat.
        order = tuple(name for name in order if name != "fused")
    return order
