"""Work that a step queues on the fake GPU while a message is on its way."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from cuda.conftest import Call
from cuda.fake_ranks import PLAIN, Case, run_case
from cuda.formulas import count_elements, list_block, list_ends
from cuda.test_steps import FORMULAS

OVERLAPS = {
    # The sum of the input's gradient travels during the product for the weight's gradient.
    "TP": ("begin_all_reduce", "product", "wait"),
    # The input is gathered during the product for its gradient, and that is summed during the
    # product for the weight's gradient.
    "SP, ZeRO 1, fp16": (
        *("begin_all_gather", "product", "begin_reduce_scatter"),
        *("wait", "product", "wait"),
    ),
}


def name_kernel(operator: str) -> str:
    """Return what a kernel computes, or an empty text if it is not of interest."""
    if operator.partition(".")[0] in ("aten::mm", "aten::addmm"):
        return "product"
    return "attention" if "scaled_dot_product" in operator else ""


def list_overlaps(case: Case) -> list[tuple[str, ...]]:
    """Run a step. Return what it does from a first message that begins to the last that it awaits.

    Matrix products and kernels of attention that are queued in between are listed. NCCL runs
    messages on a stream of its own, so both may run at the same time.
    """
    from megatron.extras.planner.dry_run.fake_gpu import FakeGpu
    from megatron.parallel import collectives, context, entered_linear

    found: list[tuple[str, ...]] = []
    events: list[str] = []
    pending = 0
    dispatch = FakeGpu.__torch_dispatch__
    wait = collectives.PendingTensor.wait

    def record_kernel(gpu: FakeGpu, func: Any, *arguments: Any) -> Any:
        kernel = name_kernel(func.name())
        if pending and kernel:
            events.append(kernel)
        return dispatch(gpu, func, *arguments)

    def record_begin(name: str) -> Any:
        begin = getattr(collectives, name)

        def begin_and_record(x: Any, tp: Any) -> Any:
            nonlocal pending
            pending += 1
            events.append(name)
            return begin(x, tp)

        return begin_and_record

    def record_wait(tensor: collectives.PendingTensor) -> Any:
        nonlocal pending
        if tensor.work is not None:
            pending -= 1
            events.append("wait")
            if not pending:
                found.append(tuple(events))
                events.clear()
        return wait(tensor)

    with ExitStack() as patches:
        for module, name in (
            (entered_linear, "begin_all_reduce"),
            (entered_linear, "begin_all_gather"),
            (entered_linear, "begin_reduce_scatter"),
            (context, "begin_all_gather"),
            (context, "begin_reduce_scatter"),
        ):
            patches.enter_context(mock.patch.object(module, name, record_begin(name)))
        patches.enter_context(mock.patch.object(FakeGpu, "__torch_dispatch__", record_kernel))
        patches.enter_context(mock.patch.object(collectives.PendingTensor, "wait", record_wait))
        run_case(case)
    return found


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        *((name, "") for name in OVERLAPS),
        pytest.param("TP", " --use-torch-compile", marks=pytest.mark.full),
        ("SP, ZeRO 1, fp16", " --use-torch-compile"),
    ],
)
def test_each_message_of_the_backward_pass_has_a_product_beside_it(
    name: str, flags: str, on_fake_gpu: Call
):
    case, layout = FORMULAS[name]
    case = replace(case, flags=case.flags + flags)
    # Two column-parallel layers in each layer: queries, keys and values, and the MLP.
    expected = [OVERLAPS[name]] * (2 * layout.layers * layout.m)
    assert on_fake_gpu(list_overlaps, case) == expected


GATHERING = ("begin_all_gather", "begin_all_gather", "wait", "attention", "wait")
"""The late keys arrive during attention of the early part."""
ADDING_UP = ("begin_reduce_scatter", "attention", "begin_reduce_scatter", "wait", "wait")
"""The gradients of the late keys are added up during the backward pass of the early part."""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 2 * [GATHERING, GATHERING, ADDING_UP, ADDING_UP]),
        # Each layer gathers again before its backward pass.
        (
            "--recompute-attention-core",
            2 * [GATHERING, GATHERING, GATHERING, ADDING_UP, GATHERING, ADDING_UP],
        ),
    ],
)
def test_keys_travel_during_attention_of_the_other_part(
    flags: str, expected: list[tuple[str, ...]], on_fake_gpu: Call
) -> None:
    """Two layers and two microbatches, after the forward pass of the engine's construction."""
    case = Case(f"--bf16 --context-parallel-size 4 --global-batch-size 4 {flags}", 4, 1)
    assert on_fake_gpu(list_overlaps, case) == [GATHERING, GATHERING, *expected]


def list_parameter_messages(case: Case) -> list[tuple[str, int]]:
    """Run a step. Return the messages for parameters and gradients, and the products in between.

    A message is its kind and the elements of the complete tensor. Neighbouring products are one
    entry with their number.
    """
    import torch

    from megatron.extras.planner.dry_run.fake_gpu import FakeGpu

    events: list[tuple[str, int]] = []
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    dispatch = FakeGpu.__torch_dispatch__
    start = FakeGpu.start_step

    def record(gpu: FakeGpu, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if func in products:
            before = events.pop()[1] if events and events[-1][0] == "products" else 0
            events.append(("products", before + 1))
        elif name == "_allgather_base_":
            events.append(("gather", args[0].numel()))
        elif name == "_reduce_scatter_base_":
            events.append(("reduce", args[1].numel()))
        return dispatch(gpu, func, types, args, kwargs)

    def forget(gpu: FakeGpu) -> None:
        # The construction gathers parameters too.
        events.clear()
        start(gpu)

    with (
        mock.patch.object(FakeGpu, "__torch_dispatch__", record),
        mock.patch.object(FakeGpu, "start_step", forget),
    ):
        run_case(case)
    return events


def test_messages_of_an_untied_head_are_sent_during_the_layers(on_fake_gpu: Call):
    case, layout = FORMULAS["ZeRO 3, untied"]
    layer = count_elements(list_block(layout.t), layout.d)
    root, head = (count_elements(shapes, layout.d) for shapes in list_ends(layout))
    # Kernels of the loss would write results of products into memory that is there already.
    plain = replace(case, flags=f"{case.flags} {PLAIN}")
    events = on_fake_gpu(list_parameter_messages, plain)
    assert (
        events
        == [
            *(("gather", root), ("gather", layer), ("products", 4)),
            *(("gather", layer), ("products", 4)),
            # The head is gathered during the last layer, unlike the embedding that comes first.
            *(("gather", head), ("products", 1)),
            # Its gradients are sent during the backward pass of the last layer.
            *(("gather", layer), ("reduce", head), ("gather", layer), ("products", 8)),
            *(("reduce", layer), ("products", 8), ("reduce", layer), ("reduce", root)),
        ]
        * layout.m
    )
