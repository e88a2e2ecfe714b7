"""The parts of a layer by name: what each choice of an activation or a norm means.

A row has what follows from the name alone: parameters, what the backward pass keeps, and which
flags have an effect. `mlp.py` and `norm.py` have the functions and modules by the same names. This
module imports no torch, so that sizes are known before a run starts. Neither an activation nor a
norm counts as FLOPs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron.config.model import ModelConfig
from megatron.config.table import Table
from megatron.parallel.parameter_spec import Init, ParameterSpec, make_vector_spec

Specs = dict[str, ParameterSpec]
"""Name of a parameter inside its part -> its spec."""


@dataclass(frozen=True)
class ActivationRow:
    """What a value of --activation or --glu-activation means."""

    kept_values: int
    """Values that the backward pass of PyTorch's operators keeps for each inner channel of a token,
    beside the input of the MLP. They have the dtype of the computation."""
    kept_bytes: int = 0
    """Bytes that it keeps beside them."""
    gated: bool = False
    """Whether the activation of one matrix's output multiplies that of another matrix."""
    has_kernel: bool = True
    """Whether `FusedOperators` may have a kernel of it."""
    has_two_forms: bool = False
    """Whether --bias-gelu-fusion has an effect."""
    parameters: Mapping[str, ParameterSpec] = field(default_factory=dict)
    """Weights of its own in each layer. All ranks have them, and experts have none."""


ACTIVATIONS = Table(
    "activation",
    {
        # The input and the result, or the results of ReLU and of the square.
        "gelu": ActivationRow(2, has_kernel=False, has_two_forms=True),
        "squared_relu": ActivationRow(2),
        # The result. In fp32: the input, its square, the clamped exponential and a difference. And
        # a condition of one byte.
        "xielu": ActivationRow(
            1,
            kept_bytes=17,
            has_kernel=False,
            parameters={
                "alpha_p": make_vector_spec(1, Init.XIELU_P),
                "alpha_n": make_vector_spec(1, Init.XIELU_N),
            },
        ),
        # The gate, its activation, the other factor and their product. ReLU keeps only its result,
        # and no activation keeps nothing.
        "swiglu": ActivationRow(4, gated=True),
        "geglu": ActivationRow(4, gated=True),
        "reglu": ActivationRow(3, gated=True),
        "liglu": ActivationRow(3, gated=True),
        # Limits keep their inputs too.
        "clamped_swiglu": ActivationRow(7, gated=True, has_kernel=False),
    },
)
"""Value of --activation or --glu-activation -> its meaning."""


def get_activation(config: ModelConfig) -> ActivationRow:
    """Return the row of the model's activation."""
    return ACTIVATIONS.require(config.activation_name)


def _list_weight(size: int) -> Specs:
    return {"weight": make_vector_spec(size, Init.ONE)}


def _list_weight_and_bias(size: int) -> Specs:
    return _list_weight(size) | {"bias": make_vector_spec(size, Init.ZERO)}


@dataclass(frozen=True)
class NormRow:
    """What a value of --normalization means."""

    list_parameters: Callable[[int], Specs]
    """Returns the parameters of a norm over this many channels. --no-norm-bias removes "bias"."""
    statistics: int
    """Numbers in fp32 that the backward pass keeps for each token."""
    spans_heads: bool = False
    """Whether there is a form over the channels of all heads, for --qk-norm full."""

    @property
    def has_bias(self) -> bool:
        """Whether --no-norm-bias has an effect."""
        return "bias" in self.list_parameters(1)


NORMS = Table(
    "--normalization",
    {
        "LayerNorm": NormRow(_list_weight_and_bias, statistics=2),
        "RMSNorm": NormRow(_list_weight, statistics=1, spans_heads=True),
    },
)
"""Value of --normalization -> its meaning."""


def list_norm_parameters(config: ModelConfig, size: int) -> Specs:
    """Return the parameters of the model's norm over this many channels."""
    specs = NORMS.require(config.normalization).list_parameters(size)
    if not config.norm_bias:
        specs.pop("bias", None)
    return specs


def list_unused_fields(config: ModelConfig) -> list[str]:
    """Return the fields of activations and norms that have no effect in a model."""
    activation = get_activation(config)
    unused = []
    if activation.gated:
        unused.append("activation")
    if not activation.has_two_forms:
        unused.append("bias_gelu_fusion")
    if not NORMS.require(config.normalization).has_bias:
        unused.append("norm_bias")
    return unused
