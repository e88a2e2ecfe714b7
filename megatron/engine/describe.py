"""Rows of the table printed at start, which lists the implementations in use and the reasons.

This module has the rows that the native and the DeepSpeed engine share.
"""

import torch

from megatron.base.plain_text import format_count
from megatron.config.kernels import SWITCHES
from megatron.engine.loss_scale import LossScale
from megatron.model.attention_kernels import pads_values
from megatron.model.execution import Execution
from megatron.model.fused_operators import FusedOperators
from megatron.model.loss import find_chunk_bytes
from megatron.model.norm import describe_norm
from megatron.parallel.mesh import Mesh
from megatron.plan.run_plan import Plan

Row = tuple[str, str, str]
"""What is described, which implementation is in use, and why."""


def list_kernels(
    plan: Plan, mesh: Mesh, execution: Execution, loss_scale: LossScale | None, pipelined: str
) -> list[Row]:
    """Return the rows that do not depend on the engine.

    Args:
        plan: The plan of the run.
        mesh: This rank's mesh.
        execution: How the blocks are computed.
        loss_scale: The loss scale, or None without fp16.
        pipelined: The name of the library that runs the pipeline schedule.
    """
    rows = [
        ("attention", *_describe_attention(plan, mesh, execution)),
        ("norm", *describe_norm(plan.config.model, mesh.device.type)),
        ("loss", "fused projection and cross entropy", "fp32 logits are not kept"),
        ("precision", *_describe_precision(plan, execution, loss_scale)),
    ]
    if "gated_delta_net" in plan.config.model.attention_kinds:
        how = ("PyTorch's operators", "GPUs have kernels with pip install 'megatron-3d[fla]'")
        if execution.operators.delta_rule is not None:
            how = ("kernels of fla-core", "it is installed")
        rows.append(("gated delta rule", *how))
    rows += _describe_fused_kernels(plan, mesh, execution)
    if "cuda_graph" in plan.kernel_reasons:
        what = {"on": "forward and backward pass"}.get(plan.config.kernels.cuda_graph, "none")
        rows.append(("CUDA graph", what, plan.kernel_reasons["cuda_graph"]))
    if mesh.grid.context > 1:
        rows.append(("sequence", *_describe_context(plan, mesh)))
    if mesh.grid.pipeline > 1:
        rows.append(("pipeline", *_describe_pipeline(plan, mesh, pipelined)))
    if execution.recomputed_part or execution.recompute_attention_core:
        rows.append(("recomputation", *_describe_recomputation(execution)))
    if execution.compile:
        graphs = "all layers share their graphs"
        if execution.dynamic_shapes:
            graphs = "any sequence length"
        rows.append(
            (
                "compiler",
                "torch.compile, each layer",
                f"{graphs}; the first steps wait for compilation",
            )
        )
    return rows


def _describe_context(plan: Plan, mesh: Mesh) -> tuple[str, str]:
    ranks = format_count(mesh.grid.context, "context-parallel rank")
    how = "gather keys and values"
    if plan.config.parallel.exchanges_heads:
        how = "exchange positions for heads"
    compiled = "; attention is not compiled" if plan.config.kernels.use_torch_compile else ""
    return f"{ranks} share each sample", f"in attention they {how}{compiled}"


def _describe_attention(plan: Plan, mesh: Mesh, execution: Execution) -> tuple[str, str]:
    config = plan.config.model
    # torch selects the kernel of SDPA at run time. The rows only name the conditions that exclude
    # its fused kernels.
    how, why = "SDPA with a bias", "layers with a sliding window need one"
    if plan.shape.has_alibi:
        why = "ALiBi needs one"
    elif config.sliding_window is None:
        how, why = "SDPA", "causal, no bias; torch uses its fused kernel where it has one"
    kernels, packs, shape = execution.attention_kernels, execution.pack_documents, plan.shape
    padded = ""
    if shape.value_dim < shape.head_dim and (packs or pads_values(kernels, mesh.device)):
        padded = f", values padded to {shape.head_dim} channels"
    how += padded
    if config.attention_dropout > 0 and not execution.draws_by_kernel:
        masks = "masks of --attention-dropout that are the same on every layout need scores"
        megabytes = find_chunk_bytes(on_gpu=mesh.device.type == "cuda") >> 20
        how = "products and softmax, some queries at a time"
        why = (
            f"{masks}: up to {megabytes} MiB of them in fp32, each block computed twice; "
            "--attention-dropout 0 has a fused kernel"
        )
    elif kernels:
        # The conditions above apply to torch's own choice.
        reason = plan.kernel_reasons.get("attention_backend", "--attention-backend")
        why = f"the first possible kernel of: {' '.join(kernels)}; {reason}"
    if packs:
        if mesh.device.type == "cpu":
            return "document by document", "a CPU has no kernel for all documents of a microbatch"
        return f"torch's varlen_attn{padded}", "one call for all documents of a microbatch"
    if plan.config.data.reset_attention_mask:
        if execution.compile:
            why += "; attention is not compiled"
        how += ", document by document"
    return how, why


def _describe_precision(
    plan: Plan, execution: Execution, loss_scale: LossScale | None
) -> tuple[str, str]:
    stream = ""
    if execution.fp32_residual:
        stream = ", residual stream fp32"
    scale = ""
    if loss_scale is not None:
        scale = f"; loss scale {loss_scale.describe()}"
    dtype = str(execution.dtype or torch.float32).removeprefix("torch.")
    first, second = plan.config.optimizer.exp_avg_dtype, plan.config.optimizer.exp_avg_sq_dtype
    in_fp32 = "masters, moments and accumulation in fp32"
    if first != second:
        in_fp32 = f"masters and accumulation in fp32, first moments in {first}, second in {second}"
    elif first != "fp32":
        in_fp32 = f"masters and accumulation in fp32, moments in {first}"
    return dtype + stream, f"{in_fp32}{scale}"


def _describe_fused_kernels(plan: Plan, mesh: Mesh, execution: Execution) -> list[Row]:
    """Return a row for each kernel that may be on or off, or one row if none is on."""
    reasons = {name: why for name, why in plan.kernel_reasons.items() if name in SWITCHES}
    if reasons and not any(getattr(plan.config.kernels, name) for name in reasons):
        # Most often, all of them have the same reason.
        return [("fused kernels", "none", ", ".join(dict.fromkeys(reasons.values())))]
    rows = []
    for name, reason in reasons.items():
        choice, note = "PyTorch's operators", ""
        if getattr(plan.config.kernels, name):
            choice, note = _name_kernel(name, mesh, execution)
        rows.append((SWITCHES[name], choice, reason + note))
    return rows


def _name_kernel(name: str, mesh: Mesh, execution: Execution) -> tuple[str, str]:
    """Return what computes a kernel that is on, and a note to its reason."""
    if name == "gradient_accumulation_fusion":
        if mesh.device.type == "cpu":
            note = "; a CPU has no product of 16 bits with a result in fp32"
            return "products of fp32 copies", note
        return "products add to fp32", ""
    if execution.operators == FusedOperators():
        return "PyTorch's operators", "; a CPU has no kernels"
    return "Triton", ""


def _describe_pipeline(plan: Plan, mesh: Mesh, pipelined: str) -> tuple[str, str]:
    ranks = mesh.grid.pipeline
    stages = plan.stages
    layers = " ".join(str(len(stage.layers)) for stage in stages)
    virtual = ""
    # A rank holds more than one stage only with virtual stages (interleaved 1F1B).
    if len(stages) > ranks:
        virtual = f", {len(stages) // ranks} stages on each"
    return f"{ranks} ranks{virtual}, {pipelined}", f"layers of the stages: {layers}"


def _describe_recomputation(execution: Execution) -> tuple[str, str]:
    """Return the row of activation recomputation, if something is recomputed."""
    part = execution.recomputed_part
    core = execution.recompute_attention_core
    if part == 1:
        layers = "every layer"
    else:
        layers = f"{part} of the layers"
    if part and core and part < 1:
        return (
            f"{layers}, attention core of the others",
            "keeps the inputs of recomputed layers, and queries, keys and values of the others",
        )
    if part:
        return layers, "keeps their inputs only"
    return "attention core", "keeps queries, keys and values, and no intermediate results"
