"""The parts of a layer by name: activations, norms, and kinds of attention and of MLP.

A row has what follows from the name: the parameters in the complete model, FLOPs, what the backward
pass keeps, and which flags have an effect. Modules are built from the same specs, by tables of the
same names in `mlp.py`, `norm.py` and `block.py`. This module imports no torch, so sizes are known
before a run starts. Only products of matrices count as FLOPs.

h: hidden size, q: width of all queries, d: width of a head, f: inner width of the MLP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from megatron.config.model import ModelConfig, QKNorm
from megatron.config.table import Table
from megatron.model.shape import LayerDescription, ModelShape
from megatron.parallel.parameter_spec import (
    Init,
    ParameterSpec,
    Piece,
    Specs,
    make_linear_specs,
    make_matrix_spec,
    make_vector_spec,
)


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
    if config.apply_layernorm_1p:
        # Weight decay would pull this weight to 0, which is the factor 1. It does not apply.
        return centre_at_zero(specs)
    return specs


def centre_at_zero(specs: Specs) -> Specs:
    """Return the parameters of a norm whose weight is stored minus 1."""
    return specs | {"weight": replace(specs["weight"], init=Init.ZERO)}


@dataclass(frozen=True)
class SoftmaxRow:
    """What a value of --softmax-type means."""

    weigh: Callable[[Any, Any], Any] | None = None
    """Maps logits, [b, n, queries, keys], and a number of each head, [n], to the weights of values.
    None: the softmax of the logits alone, which all kernels of PyTorch compute."""
    parameter: str | None = None
    """Name of the parameter of these numbers. None: they are 0."""

    def list_parameters(self, heads: int) -> Specs:
        """Return the parameters of a layer with this many heads."""
        spec = make_vector_spec(heads, Init.VECTOR, shard_dim=0)
        return {} if self.parameter is None else {self.parameter: spec}


def _weigh_with_sink(logits: Any, sink: Any) -> Any:
    """Return the softmax of logits and a sink, which has a weight and no value."""
    # Only methods of the tensors are used, because this module imports no torch.
    total = logits.logsumexp(3, keepdim=True).logaddexp(sink.float().view(-1, 1, 1))
    return (logits - total).exp()


SOFTMAXES = Table(
    "--softmax-type",
    {
        "vanilla": SoftmaxRow(),
        "off-by-one": SoftmaxRow(_weigh_with_sink),
        "learnable": SoftmaxRow(_weigh_with_sink, "sink"),
    },
)
"""Value of --softmax-type -> its meaning."""


def _list_query_key_norms(shape: ModelShape, kind: QKNorm) -> Specs:
    """Return the parameters of the norms that `--qk-norm` names."""
    config = shape.config
    specs: Specs = {}
    for name, heads in (("q_norm", config.num_attention_heads), ("k_norm", shape.query_groups)):
        match kind:
            case "full":
                own = {"weight": make_vector_spec(heads * shape.head_dim, Init.ONE, shard_dim=0)}
                if config.apply_layernorm_1p:
                    own = centre_at_zero(own)
            case "head":
                own = list_norm_parameters(config, shape.head_dim)
            case _:
                assert_never(kind)
        specs |= {f"{name}.{leaf}": spec for leaf, spec in own.items()}
    return specs


def _list_shared_groups(shape: ModelShape, tensor_size: int, rank: int) -> Specs:
    """Return the projection to queries, keys and values if several ranks share a query group.

    A rank has the queries of some heads of one group, and keys and values of all groups.
    """
    config = shape.config
    groups = shape.query_groups
    group_rows = (config.num_attention_heads // groups + 2) * shape.head_dim
    own = config.num_attention_heads // tensor_size * shape.head_dim
    pair = 2 * shape.head_dim
    group, member = divmod(rank, tensor_size // groups)
    queries = (Piece(0, group * group_rows + member * own, own),)
    keys_values = tuple(Piece(i * pair, (i + 1) * group_rows - pair, pair) for i in range(groups))
    whole = make_linear_specs(
        "qkv",
        groups * group_rows,
        config.hidden_size,
        Init.NORMAL,
        bias=shape.has_qkv_bias,
        shard_dim=0,
    )
    specs = {}
    for name, spec in whole.items():
        leaf = name.removeprefix("qkv.")
        specs[name] = replace(spec, rows_of=leaf, pieces=queries)
        specs[f"qkv.shared_{leaf}"] = replace(
            spec, rows_of=leaf, pieces=keys_values, shard_dim=None, partial_gradient=True
        )
    return specs


def _list_dot_product(shape: ModelShape, tensor_size: int, rank: int) -> Specs:
    config = shape.config
    q = config.num_attention_heads * shape.head_dim
    if shape.query_groups < tensor_size:
        projection = _list_shared_groups(shape, tensor_size, rank)
    else:
        # n/g query heads, one key and one value for each group.
        rows = q + 2 * shape.query_groups * shape.head_dim
        bias = shape.has_qkv_bias
        projection = make_linear_specs(
            "qkv", rows, config.hidden_size, Init.NORMAL, bias=bias, shard_dim=0
        )
    if shape.gate_dim:
        # A matrix of its own, so that the rows of a group stay neighbours in the other one.
        rows = config.num_attention_heads * shape.gate_dim
        bias = shape.has_qkv_bias
        projection |= make_linear_specs(
            "gate", rows, config.hidden_size, Init.NORMAL, bias=bias, shard_dim=0
        )
    if config.qk_norm is not None:
        projection |= _list_query_key_norms(shape, config.qk_norm)
    bias = shape.has_attention_bias
    return (
        projection
        | SOFTMAXES.require(config.softmax_type).list_parameters(config.num_attention_heads)
        | make_linear_specs(
            "out", config.hidden_size, q, Init.SCALED_NORMAL, bias=bias, shard_dim=1
        )
    )


def _count_pair(shape: ModelShape) -> int:
    # A channel of the score, or of the weighted value, costs 2 for each pair and head.
    return 2 * shape.config.num_attention_heads * (shape.head_dim + shape.value_dim)


def _list_latent(shape: ModelShape, tensor_size: int, rank: int) -> Specs:
    """Return the parameters of latent attention.

    Matrices that write latent vectors are on all tensor-parallel ranks, and those that read them
    are sharded by heads. Each is a matrix of its own, so Muon updates it as it was published.
    """
    config = shape.config
    heads = config.num_attention_heads
    h, latent = config.hidden_size, config.kv_lora_rank
    specs: Specs = {}
    if config.q_lora_rank is not None:
        specs["query_down.weight"] = make_matrix_spec(config.q_lora_rank, h, Init.NORMAL)
        norm = list_norm_parameters(config, config.q_lora_rank)
        specs |= {f"query_norm.{leaf}": spec for leaf, spec in norm.items()}
    specs["query.weight"] = make_matrix_spec(
        heads * shape.head_dim, config.q_lora_rank or h, Init.NORMAL, shard_dim=0
    )
    # The last rows are the key that all heads share.
    rows = latent + config.qk_pos_emb_head_dim
    specs["latent_down.weight"] = make_matrix_spec(rows, h, Init.NORMAL)
    norm = list_norm_parameters(config, latent)
    specs |= {f"latent_norm.{leaf}": spec for leaf, spec in norm.items()}
    # Each head has the rows of its key, and then those of its value.
    rows = heads * (config.qk_head_dim + shape.value_dim)
    specs["latent_up.weight"] = make_matrix_spec(rows, latent, Init.NORMAL, shard_dim=0)
    return specs | make_linear_specs(
        "out", h, heads * shape.value_dim, Init.SCALED_NORMAL, bias=False, shard_dim=1
    )


def _list_gated_delta_net(shape: ModelShape, tensor_size: int, rank: int) -> Specs:
    """Return the parameters of a gated delta net.

    Each part of its projection is a matrix of its own. So a rank's heads are neighbouring rows of
    each, and Muon updates each by itself.
    """
    config = shape.config
    heads = config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = heads * config.linear_value_head_dim
    rows = {"query": keys, "key": keys, "value": values, "gate": values}
    rows |= {"beta": heads, "alpha": heads}
    specs: Specs = {}
    for name, size in rows.items():
        specs |= make_linear_specs(
            name, size, config.hidden_size, Init.NORMAL, bias=False, shard_dim=0
        )
    for name in ("query", "key", "value"):
        specs[f"{name}_convolution"] = ParameterSpec(
            (rows[name], config.linear_conv_kernel_dim), Init.CONVOLUTION, decays=False, shard_dim=0
        )
    specs["A_log"] = make_vector_spec(heads, Init.DECAY_RATE, shard_dim=0)
    specs["dt_bias"] = make_vector_spec(heads, Init.TIME_STEP, shard_dim=0)
    specs["norm.weight"] = make_vector_spec(config.linear_value_head_dim, Init.ONE)
    return specs | make_linear_specs(
        "out", config.hidden_size, values, Init.SCALED_NORMAL, bias=False, shard_dim=1
    )


def _count_gated_delta_net(shape: ModelShape) -> int:
    # Products of the state with a key and a query, and of a key with what is written. Chunks only
    # change the order of these sums, and what they compute more is not counted.
    config = shape.config
    state = config.linear_key_head_dim * config.linear_value_head_dim
    return 6 * config.linear_num_value_heads * state


@dataclass(frozen=True)
class AttentionRow:
    """A kind of attention."""

    list_parameters: Callable[[ModelShape, int, int], Specs]
    """Returns the parameters of a layer for a number of tensor-parallel ranks and one of them."""
    count_pair_flops: Callable[[ModelShape], int]
    """Returns the forward FLOPs for a query and a key that it attends to, over all heads."""
    count_token_flops: Callable[[ModelShape], int] = lambda shape: 0
    """Returns those of a token beside them and the linear layers."""


ATTENTIONS = Table(
    "attention",
    {
        "dot_product": AttentionRow(_list_dot_product, _count_pair),
        "latent": AttentionRow(_list_latent, _count_pair),
        # No token reads another one: the state has a fixed size.
        "gated_delta_net": AttentionRow(
            _list_gated_delta_net, lambda shape: 0, _count_gated_delta_net
        ),
    },
)
"""Kind of attention -> its meaning. `ModelShape.describe_layer` has the kind of each layer."""


def list_mlp_parameters(shape: ModelShape, width: int | None = None) -> Specs:
    """Return the parameters of an MLP of an inner width. Default: that of the model's MLPs."""
    h = shape.config.hidden_size
    f = width or shape.ffn_hidden_size
    bias = shape.has_mlp_bias
    activation = get_activation(shape.config)
    specs = make_linear_specs("up", f, h, Init.NORMAL, bias=bias, shard_dim=0)
    if activation.gated:
        specs |= make_linear_specs("gate", f, h, Init.NORMAL, bias=bias, shard_dim=0)
    specs |= make_linear_specs("down", h, f, Init.SCALED_NORMAL, bias=bias, shard_dim=1)
    return specs | {f"activation.{name}": spec for name, spec in activation.parameters.items()}


def list_expert_parameters(shape: ModelShape) -> Specs:
    """Return the parameters of all experts of a layer. They are one below the other."""
    config = shape.config
    number = config.num_experts or 0
    specs = {}
    for name, spec in list_mlp_parameters(shape, shape.expert_width).items():
        rows, *columns = spec.shape
        specs[name.removesuffix(".weight").replace(".", "_")] = replace(
            spec, shape=(number * rows, *columns), shard_dim=None, by_expert=True
        )
    return specs


def _list_mixture(shape: ModelShape) -> Specs:
    """Return the parameters of router, experts and shared expert."""
    config = shape.config
    number = config.num_experts or 0
    specs = {"router.weight": make_matrix_spec(number, config.hidden_size, Init.NORMAL)}
    if shape.has_mlp_bias:
        specs["router.bias"] = make_vector_spec(number, Init.ZERO)
    specs |= {f"experts.{name}": spec for name, spec in list_expert_parameters(shape).items()}
    width = config.moe_shared_expert_intermediate_size
    if width is not None:
        shared = list_mlp_parameters(shape, width)
        specs |= {f"shared.{name}": spec for name, spec in shared.items()}
        if config.moe_shared_expert_gate:
            specs["shared_gate"] = make_matrix_spec(1, config.hidden_size, Init.NORMAL)
    return specs


@dataclass(frozen=True)
class MLPRow:
    """A kind of MLP."""

    list_parameters: Callable[[ModelShape], Specs]
    """Returns the parameters of a layer."""


MLPS = Table("MLP", {"dense": MLPRow(list_mlp_parameters), "experts": MLPRow(_list_mixture)})
"""Kind of MLP -> its meaning. `ModelShape.describe_layer` has the kind of each layer."""


def list_layer_parameters(
    shape: ModelShape, layer: LayerDescription, tensor_size: int = 1, rank: int = 0
) -> Specs:
    """Return the parameters of a layer by their names inside of it.

    Args:
        shape: Sizes of the model.
        layer: The kinds of its parts.
        tensor_size: Number of tensor-parallel ranks.
        rank: The tensor-parallel rank.
    """
    norms = {
        "input": ("input_norm", "post_attention_norm"),
        "output": ("attention_output_norm", "mlp_output_norm"),
    }[layer.norms]
    parts = {name: list_norm_parameters(shape.config, shape.config.hidden_size) for name in norms}
    attention = ATTENTIONS.require(layer.attention)
    parts["attention"] = attention.list_parameters(shape, tensor_size, rank)
    parts["mlp"] = MLPS.require(layer.mlp).list_parameters(shape)
    return {f"{part}.{name}": spec for part, own in parts.items() for name, spec in own.items()}


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
