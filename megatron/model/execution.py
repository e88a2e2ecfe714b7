"""How blocks are computed: recomputation, precision of the residual stream and compilation.

None of it changes the mathematics.

Full recomputation keeps only the input of a block (https://arxiv.org/abs/1604.06174). It can be
applied to a fraction of the blocks, evenly spread over the model, to save less memory at less cost.
Selective recomputation repeats the attention core alone. The core is cheap to compute, and large to
keep if no flash kernel is used (https://arxiv.org/abs/2205.05198, section 5).
"""

from dataclasses import dataclass, field
from fractions import Fraction

import torch

from megatron.config.tree import Config
from megatron.model import flops
from megatron.model.fused_operators import FusedOperators


@dataclass(frozen=True)
class Execution:
    """The settings that decide how blocks are computed."""

    dtype: torch.dtype | None = None
    """Dtype in which the blocks compute. None means the dtype of the residual stream."""
    recomputed_part: Fraction = Fraction(0)
    """Share of all blocks. 1 is every block, and 1/3 is the second of every three."""
    kept_operators: tuple[str, ...] = ()
    """Operators of recomputed blocks whose results are kept. See `Recomputation`."""
    partition_activations: bool = False
    checkpoint_in_cpu: bool = False
    recompute_attention_core: bool = False
    fp32_residual: bool = False
    attention_kernels: tuple[str, ...] = ()
    """The kernels that attention may use, the preferred one first. Empty: PyTorch chooses. by-gpu
    is replaced at the start of a run."""
    draws_by_kernel: bool = False
    """Attention kernels draw dropout masks of their own, which depend on the layout."""
    pack_documents: bool = False
    """Compute the attention of all documents of a microbatch in one call."""
    fused_gradients: bool = False
    """Let matrix products add to the weights' gradients in fp32."""
    operators: FusedOperators = field(default_factory=FusedOperators)
    """Kernels that replace several of PyTorch's operators. They are built in, not configured."""
    compile: bool = False
    dynamic_shapes: bool = False
    """Compile for any sequence length."""

    @classmethod
    def from_config(cls, config: Config, *, dynamic_shapes: bool) -> "Execution":
        """Derive the settings from the configuration.

        Args:
            config: The resolved configuration.
            dynamic_shapes: The sequence length changes during the run.
        """
        recompute = config.recompute
        precision = config.precision
        dtype = torch.float32
        if precision.fp16:
            dtype = torch.float16
        elif precision.bf16:
            dtype = torch.bfloat16
        order = [x for x in config.kernels.attention_backend if x not in ("auto", "by-gpu")]
        if config.kernels.deterministic_mode:
            # PyTorch's order may begin with cuDNN, whose backward pass does not repeat.
            order = [x for x in order if x != "fused"] or ["flash", "efficient", "unfused"]
        return cls(
            dtype=dtype,
            recomputed_part=recompute.recomputed_part,
            kept_operators=recompute.checkpoint_keep_operators,
            partition_activations=recompute.partition_activations,
            checkpoint_in_cpu=recompute.checkpoint_in_cpu,
            recompute_attention_core=recompute.recompute_attention_core,
            # In fp32 the stream has full precision anyway, and the flag has no effect.
            fp32_residual=precision.fp32_residual_connection and (precision.fp16 or precision.bf16),
            attention_kernels=tuple(order),
            draws_by_kernel=config.kernels.names_fused_attention
            and config.model.attention_dropout > 0,
            pack_documents=config.kernels.use_varlen_attention,
            fused_gradients=bool(config.kernels.gradient_accumulation_fusion),
            compile=config.kernels.use_torch_compile,
            dynamic_shapes=dynamic_shapes,
        )

    def is_recomputed(self, layer: int) -> bool:
        """Return whether the block with this number in the complete model is recomputed."""
        return flops.count_recomputed_layers(range(layer, layer + 1), self.recomputed_part) > 0
