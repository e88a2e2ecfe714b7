"""Settings of kernels, which select the implementation that computes a step.

None of these settings changes the mathematics.
"""

from dataclasses import dataclass
from typing import Literal

AttentionBackend = Literal["auto", "by-gpu", "flash", "fused", "efficient", "unfused"]

FUSED_ATTENTION = {"flash", "fused", "efficient"}
"""The kernels of attention that draw dropout masks of their own."""
TRITON = {
    "rope_fusion": "rotary positions",
    "bias_swiglu_fusion": "gated MLP",
    "residual_norm_fusion": "norms and additions",
    "cross_entropy_loss_fusion": "softmax of the loss",
    "adamw_fusion": "AdamW",
}
"""Setting of a kernel that needs Triton -> what it computes."""
SWITCHES = {"gradient_accumulation_fusion": "weight gradients", **TRITON}
"""Setting of a kernel that is on, off or left to the trainer -> what it computes."""


@dataclass(frozen=True)
class KernelsConfig:
    """Settings that select kernels."""

    use_torch_compile: bool = False
    """Compile each transformer layer with torch.compile. This fuses norms, rotary positions and
    activations, and the start is slower."""
    deterministic_mode: bool = False
    """Use only kernels that give the same bits each time, and NCCL's ring algorithm. On a GPU,
    backward passes of attention otherwise add up in an order that changes, so a resumed run is not
    bit-identical. Attention leaves out fused (cuDNN), whose backward pass does not repeat. It is
    slower. The run ends with an error at an operator that has no such kernel. apex, DeepSpeed and
    torch.compile choose kernels of their own. A CPU needs no such flag."""
    attention_backend: tuple[AttentionBackend, ...] = ("by-gpu",)
    """Kernels that attention may use, the preferred one first, as in: fused flash unfused. Each
    layer takes the first that can compute it. by-gpu: cuDNN's first on GPUs of compute capability
    9.0 (H100, H200), and PyTorch chooses elsewhere. auto: PyTorch chooses. flash: FlashAttention
    (https://arxiv.org/abs/2307.08691). fused: cuDNN. efficient: memory-efficient attention
    (https://arxiv.org/abs/2112.05682). unfused: matrix products and a softmax, which compute
    everything. flash and unfused exist on CPUs too. A run that none of them can compute is refused
    at the start. unfused alone is refused with --use-torch-compile, which may replace it. With
    --attention-dropout, a list that names flash, fused or efficient lets these kernels draw masks
    of their own, and numbers then depend on the layout."""
    gradient_accumulation_fusion: bool | None = None
    """Let the matrix products of the layers add to the weights' gradients in fp32. Without it, the
    product of each microbatch is rounded to 16 bits first. It needs --bf16 or --fp16, and the
    native engine. auto: on GPUs, unless several data-parallel ranks send gradients after each
    microbatch, as with --zero-stage 2. A CPU multiplies fp32 copies, which is slower."""
    rope_fusion: bool | None = None
    """Rotate queries and keys, and divide the projection, in one Triton kernel in each direction.
    With --qk-norm head and RMSNorm, the kernel computes the norms too.
    auto: on GPUs if Triton is installed, but not with --use-torch-compile, which fuses them itself.
    on needs pip install 'megatron-3d[kernels]'. On a CPU, PyTorch's operators compute the same."""
    bias_swiglu_fusion: bool | None = None
    """Compute the product inside a gated MLP in one Triton kernel in each direction, for each value
    of --glu-activation except clamped_swiglu, or the square of --activation squared_relu. auto: on
    GPUs if Triton is installed, but not with --use-torch-compile, which fuses it itself. on needs
    pip install 'megatron-3d[kernels]'. On a CPU, PyTorch's operators compute the same."""
    residual_norm_fusion: bool | None = None
    """Compute the norms before attention and before the MLP in Triton kernels that also add to the
    residual stream, or to its gradient. Not with --norm-placement output, with
    --fp32-residual-connection, or in compiled layers, where PyTorch's operators compute the same.
    auto: on GPUs if Triton is installed, but not with --use-torch-compile, which fuses them itself.
    on needs pip install 'megatron-3d[kernels]'. On a CPU, PyTorch's operators compute the same."""
    cross_entropy_loss_fusion: bool | None = None
    """Compute softmax and gradient of the logits in Triton kernels, which keep the logits in the
    dtype of the step. auto: on GPUs if Triton is installed. on needs pip install
    'megatron-3d[kernels]'. On a CPU, PyTorch's operators compute the same."""
    adamw_fusion: bool | None = None
    """Update weights, moments and the 16-bit copy of the weights in one Triton kernel. It is for
    --optimizer adam on the native engine. apex' FusedAdam, if it is installed, is used instead.
    auto: on GPUs if Triton is installed. on needs pip install 'megatron-3d[kernels]'. On a CPU,
    PyTorch's operators compute the same."""
    use_varlen_attention: bool = False
    """Compute the attention of all documents of a microbatch in one call of torch's varlen_attn,
    instead of one call for each document. It is for --reset-attention-mask with short documents. It
    needs --bf16 or --fp16 and --attention-dropout 0, and has no ALiBi.
    On a CPU, a loop computes the same."""
    cuda_graph: Literal["auto", "on", "off"] = "auto"
    """Record the kernels of a microbatch's forward and backward pass in a CUDA graph, and let the
    GPU repeat it. Python then starts no kernels. With small and compiled models, the GPU waits for
    these starts. All numbers stay the same. auto: on one GPU. on: also with tensor parallelism. The
    table at the start gives the reason if a run has no graphs, as with a pipeline, experts or
    --reset-attention-mask. If the memory does not suffice, the log has a warning."""

    late_reading: bool = True
    """On a GPU, queue the microbatches of the next step before the host reads loss and gradient
    norm of this one. The device then decides whether the update is applied. All numbers stay the
    same. It is for --optimizer adam on the native engine. The table at the start gives the reason
    if a run reads each step before its update, as with experts. It has not run on a GPU yet. Off
    (--no-late-reading): each step is read before its update."""

    @property
    def names_fused_attention(self) -> bool:
        """Whether --attention-backend names a fused kernel."""
        return bool(FUSED_ATTENTION & set(self.attention_backend))

    @property
    def fusion_flags(self) -> tuple[str, ...]:
        """The given flags that ask for a kernel of `megatron.extras.step.kernels`."""
        return tuple(f"--{name.replace('_', '-')}" for name in TRITON if getattr(self, name))
