"""torch.compile on the fake GPU: all of it except for the kernels.

Functions are traced, and their backward graphs are derived. The partitioner of torch chooses what
the forward graph keeps and what the backward graph computes again. Inductor lowers both graphs to
the operations that Triton would turn into kernels. Triton needs a real GPU, so the graphs'
operators run one by one instead.

This module imports Inductor, which takes seconds. It is imported when a function is compiled.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.compile_fx import (
    compile_fx,
    fake_tensor_prop,
    record_original_output_strides,
    view_to_reshape,
)
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V


def compile_without_kernels(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """Return a function that runs a traced graph. It takes the place of Inductor."""
    # Constants have no values on a fake GPU, so nothing can be computed from them in advance.
    patches = {"joint_graph_constant_folding": False}
    return compile_fx(graph, inputs, inner_compile=_lower, config_patches=patches)


def _lower(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    is_inference: bool = False,
    is_backward: bool = False,
    **options: Any,
) -> Any:
    """Lower a forward or backward graph, and return a function that runs its operators.

    Raises:
        LoweringException: Inductor cannot lower an operator.
    """
    # These are the steps of Inductor's own function up to its generation of code.
    view_to_reshape(graph)
    with torch.no_grad():
        fake_mode = fake_tensor_prop(graph, inputs)
    record_original_output_strides(graph)
    with V.set_fake_mode(fake_mode):
        post_grad_passes(graph, is_inference=is_inference)
        lowering = GraphLowering(
            graph,
            example_inputs=inputs,
            shape_env=fake_mode.shape_env,
            is_inference=is_inference,
            is_backward=is_backward,
        )
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]):
            lowering.run(*inputs)
    return make_boxed_func(graph.forward)
