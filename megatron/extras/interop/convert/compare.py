"""The comparison of a model in the format of Hugging Face with the same model here.

The tensors of the folder run through the layers of `transformers` and of this package, on the same
input. So an error in a table of names or layouts is found, even if export and import share it. One
layer of one side is in memory at a time. The complete model is compared if it fits into the memory.
If it does not, the embedding and the head are compared without layers, some rows at a time.
"""

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.base.errors import CheckpointError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.architectures import Architecture
from megatron.extras.interop.convert.hf_files import HfTensors, import_transformers
from megatron.extras.interop.convert.tensors import VOCABULARY_TENSORS, TensorPair
from megatron.model.experts.routing import BALANCE, list_routers
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs
from megatron.model.shape import ModelShape
from megatron.parallel.mesh import TensorParallel

BOUND = 1e-4
"""Largest difference, relative to the standard deviation of what is compared."""
_LENGTH = 64
"""Tokens of the inputs."""
_ATTEMPTS = 4
"""Inputs that are tried for a model with experts."""
_INPUT_STD = 0.05
"""Standard deviation of the inputs of a layer."""
_FEW_IDS = 8
"""Vocabulary of a model of which only a layer is used."""
PART_NUMBERS = 1 << 24
"""Numbers of a large tensor that are in memory at a time, where a part is enough."""
_SHARE_OF_MEMORY = 0.7
"""Part of the free memory that both complete models may take."""


@dataclass(frozen=True)
class HfModel:
    """A folder in the format of Hugging Face, and how to read it as a model of this trainer."""

    architecture: Architecture
    model: ModelConfig
    """Our description."""
    config: Any
    """Their description, an object of `transformers`."""
    pairs: Sequence[TensorPair]
    """Our tensors with those of Hugging Face."""
    names: Mapping[str, str]
    """Their name of a tensor -> its name in the files."""
    tensors: HfTensors
    rows: tuple[int, int] | None = None
    """The first row of the vocabulary that belongs to the model, and the one after the last."""

    @property
    def vocab_size(self) -> int:
        """Rows of the word embedding."""
        if self.rows is not None:
            return self.rows[1] - self.rows[0]
        return next(p.shape[0] for p in self.pairs if p.name == "embedding.word.weight")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(torch.Size(pair.shape).numel() for pair in self.pairs)

    def read(self, pair: TensorPair) -> tuple[Tensor, ...]:
        """Return their tensors of a pair, in the dtype of the files."""
        rows = self.rows if pair.name in VOCABULARY_TENSORS else None
        return tuple(self.tensors.read(self.names[name], rows) for name in pair.hf_names)


@dataclass(frozen=True)
class Comparison:
    """The differences that were found, relative to the standard deviation of what is compared."""

    layers: float
    """Largest difference of what a layer adds to the residual stream, over all layers."""
    logits: float | None
    """Largest difference of the logits. None: the complete model was not compared."""
    divergence: float | None
    """Mean Kullback-Leibler divergence of the predictions, in nats."""
    same_argmax: float | None
    """Share of the tokens with the same most likely id, where its lead exceeds the bound."""

    def describe(self) -> list[str]:
        """Return lines for people."""
        lines = [f"layers: largest difference {self.layers:.1e} of the standard deviation"]
        if self.logits is None:
            return [*lines, "complete model: not compared"]
        return [
            *lines,
            f"logits: largest difference {self.logits:.1e} of the standard deviation",
            f"predictions: Kullback-Leibler divergence {self.divergence:.1e}, same most likely "
            f"token in {100 * (self.same_argmax or 0):.2f} % of the clear cases",
        ]


def compare_models(
    hf: HfModel, log: Callable[[str], None] = lambda line: None, *, complete: bool = True
) -> Comparison:
    """Compare a folder with our model of the same tensors.

    Args:
        hf: The folder.
        log: Receives a line for each part that was compared.
        complete: Compare the complete model as well, if it fits into the memory.

    Raises:
        CheckpointError: a difference exceeds the bound. The message names the part.
    """
    worst = 0.0
    # Rounding may exchange two experts that are nearly equally good for a token. That depends on
    # the input, and a wrong conversion does not.
    attempts = range(1 if hf.architecture.experts is None else _ATTEMPTS)
    for layer in range(hf.model.num_layers):
        for attempt in attempts:
            found = _compare_layer(hf, layer, attempt)
            if found <= BOUND:
                break
        _check_difference(found, f"layer {layer}")
        worst = max(worst, found)
    log(f"{hf.model.num_layers} layers agree")
    if not complete or 2 * 4 * hf.parameters > _SHARE_OF_MEMORY * _count_free_bytes():
        _compare_ends(hf)
        return Comparison(worst, None, None, None)
    for attempt in attempts:
        logits, divergence, same = _compare_logits(hf, hf.model.num_layers, attempt)
        if logits <= BOUND:
            break
    _check_difference(logits, "the logits of the complete model")
    if same < 1:
        raise CheckpointError(
            f"only {100 * same:.2f} % of the clear predictions have the same most likely token"
        )
    return Comparison(worst, logits, divergence, same)


def _compare_ends(hf: HfModel) -> None:
    """Compare the embedding, the last norm and the output matrix, without layers.

    Raises:
        CheckpointError: a difference exceeds the bound.
    """
    rows = max(1, PART_NUMBERS // hf.model.hidden_size)
    for begin in range(0, hf.vocab_size, rows):
        part = (begin, min(begin + rows, hf.vocab_size))
        found, _, _ = _compare_logits(dataclasses.replace(hf, rows=part), layers=0)
        _check_difference(found, "the embedding, the last norm and the output matrix together")


def _check_difference(difference: float, what: str) -> None:
    # NaN fails this comparison as well.
    if not difference <= BOUND:
        raise CheckpointError(
            f"{what}: transformers and this trainer differ by {difference:.1e} of the standard "
            f"deviation, and at most {BOUND:.0e} is allowed. The conversion of this architecture "
            "is wrong, or config.json does not describe these tensors"
        )


def _compare_layer(hf: HfModel, layer: int, attempt: int) -> float:
    """Return the difference of one layer, relative to the deviation of what it adds.

    Each attempt has another input.
    """
    pairs = [pair for pair in hf.pairs if pair.layer == layer]
    # Only one side is in memory at a time, so each function builds its own.
    given, expected = _run_hf_layer(hf, layer, pairs, attempt)
    found = _run_our_layer(hf, layer, pairs, given)
    added = expected - given
    return float((found - expected).abs().max() / added.std())


def _run_hf_layer(
    hf: HfModel, layer: int, pairs: Sequence[TensorPair], attempt: int
) -> tuple[Tensor, Tensor]:
    """Return input and output of a layer of `transformers`, both [b, s, h].

    Args:
        hf: The folder.
        layer: Number of the layer.
        pairs: The tensors of the layer.
        attempt: Number of the input.
    """
    config = _select_layers(hf.config, [layer])
    config.vocab_size = _FEW_IDS
    made = _build_hf_model(import_transformers().AutoModel, config)
    made = _load_hf_model(made, hf, pairs, {layer: 0})
    model = hf.model
    generator = torch.Generator().manual_seed(layer + hf.model.num_layers * attempt)
    length = min(_LENGTH, model.seq_length)
    # Small inputs, so that their rounding does not hide what a layer with small weights adds.
    given = _INPUT_STD * torch.randn((1, length, model.hidden_size), generator=generator)
    seen: dict[str, Tensor] = {}

    def record(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        seen["in"] = args[0] if args else kwargs["hidden_states"]
        seen["out"] = out[0] if isinstance(out, tuple) else out

    # The complete model makes the masks and positions of the layer. Its embedding may have a norm
    # or positions, so the input of the layer is not `given`.
    path = hf.architecture.layers.removeprefix(f"{hf.architecture.base}.")
    block = made.get_submodule(f"{path}.0")
    handle = block.register_forward_hook(record, with_kwargs=True)
    with torch.no_grad():
        made(inputs_embeds=given, use_cache=False)
    handle.remove()
    return seen["in"], seen["out"]


def _run_our_layer(hf: HfModel, layer: int, pairs: Sequence[TensorPair], given: Tensor) -> Tensor:
    """Return the output of our layer with their weights, [b, s, h].

    Args:
        hf: The folder.
        layer: Number of the layer.
        pairs: The tensors of the layer.
        given: Input of the layer, [b, s, h].
    """
    model = hf.model
    described = ModelShape(model, 0, 0).describe_layer(layer)
    variant = None
    if described.attention == "gated_delta_net":
        variant = described.attention
    # The lists of layers count from the first one. A model of one layer has shorter lists.
    without_rope = None
    if model.no_rope_layers is not None and not described.rotary:
        without_rope = "0"
    one = dataclasses.replace(
        model,
        num_layers=1,
        num_experts=model.num_experts if described.experts else None,
        moe_layer_freq="1",
        experimental_attention_variant=variant,
        linear_attention_freq="[1]",
        no_rope_layers=without_rope,
        sliding_window=described.window,
        full_attention_layers=None,
    )
    own = _build_model(one, _FEW_IDS)
    _load_model(own, hf, pairs, {layer: 0})
    with torch.no_grad():
        inputs = Inputs(torch.zeros(given.shape[:2], dtype=torch.long))
        positions = own.position_tables.make_positions(inputs, torch.float32)
        # Our blocks take [s, b, h].
        stream = given.transpose(0, 1).contiguous()
        return own.get_blocks()[0](stream, positions, inputs.dropout_key).transpose(0, 1)


def _compare_logits(hf: HfModel, layers: int, attempt: int = 0) -> tuple[float, float, float]:
    """Compare a model of the first `layers` layers, with its embedding and head.

    Args:
        hf: The folder.
        layers: Number of layers.
        attempt: Number of the input. Later ones are shorter.

    Returns:
        The largest difference of the logits relative to their deviation, the mean divergence of
        the predictions, and the share of the clear ones with the same most likely id.
    """
    pairs = [pair for pair in hf.pairs if pair.layer is None or pair.layer < layers]
    generator = torch.Generator().manual_seed(1 + attempt)
    length = min(_LENGTH >> attempt, hf.model.seq_length)
    tokens = torch.randint(0, hf.vocab_size, (2, length), generator=generator)
    # Only one side is in memory at a time, so each function builds its own.
    expected = _compute_hf_logits(hf, layers, pairs, tokens)
    logits = _compute_our_logits(hf, layers, pairs, tokens)
    deviation = expected.std()
    difference = float((logits - expected).abs().max() / deviation)
    log_p = expected.log_softmax(-1)
    divergence = float((log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1).mean())
    # Rounding can give a small negative number.
    divergence = max(0.0, divergence)
    # Where two ids are nearly equally likely, rounding alone may exchange them.
    top = expected.topk(min(2, hf.vocab_size), dim=-1).values
    clear = (top[..., 0] - top[..., -1]) > 2 * BOUND * deviation
    same = (logits.argmax(-1) == expected.argmax(-1))[clear]
    share = 1.0
    if len(same):
        share = float(same.float().mean())
    return difference, divergence, share


def _compute_hf_logits(
    hf: HfModel, layers: int, pairs: Sequence[TensorPair], tokens: Tensor
) -> Tensor:
    """Return the logits of the first `layers` layers in `transformers`, [b, s, v] in fp32."""
    config = _select_layers(hf.config, range(layers))
    config.vocab_size = hf.vocab_size
    made = _build_hf_model(import_transformers().AutoModelForCausalLM, config)
    made = _load_hf_model(made, hf, pairs, {layer: layer for layer in range(layers)})
    with torch.no_grad():
        logits: Tensor = made(tokens, use_cache=False).logits.float()
    return logits


def _compute_our_logits(
    hf: HfModel, layers: int, pairs: Sequence[TensorPair], tokens: Tensor
) -> Tensor:
    """Return the logits of our first `layers` layers with their weights, [b, s, v] in fp32."""
    model = dataclasses.replace(hf.model, num_layers=layers)
    if layers == 0:
        # No layer can be chosen.
        model = dataclasses.replace(
            model,
            num_experts=None,
            experimental_attention_variant=None,
            no_rope_layers=None,
            sliding_window=None,
            full_attention_layers=None,
        )
    own = _build_model(model, hf.vocab_size)
    _load_model(own, hf, pairs, {layer: layer for layer in range(layers)})
    with torch.no_grad():
        return own.compute_logits(tokens)


def _build_hf_model(model_class: Any, config: Any) -> Any:
    """Return a model of `transformers` in evaluation mode, with weights that are not loaded yet."""
    # The id of padding may be outside of the smaller vocabulary. It does not change the results.
    config.pad_token_id = None
    # Eager attention computes in fp32 as the model here does, and knows all masks.
    made = model_class.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return made.eval()


def _select_layers(hf_config: Any, layers: Sequence[int]) -> Any:
    """Return a copy of their configuration with some of the layers."""
    config = copy.deepcopy(hf_config)
    for name in ("layer_types", "no_rope_layers"):
        values = getattr(config, name, None)
        if values is not None:
            setattr(config, name, [values[layer] for layer in layers])
    # Qwen 3 names the layers without experts, by a list and by a step.
    if getattr(config, "mlp_only_layers", None) is not None:
        step = config.decoder_sparse_step
        dense = {at for at in layers if at in config.mlp_only_layers or (at + 1) % step}
        config.mlp_only_layers = [new for new, old in enumerate(layers) if old in dense]
        config.decoder_sparse_step = 1
    # DeepSeek has MLPs in its first layers.
    if getattr(config, "first_k_dense_replace", None) is not None:
        config.first_k_dense_replace = sum(at < config.first_k_dense_replace for at in layers)
    config.num_hidden_layers = len(layers)
    return config


def _build_model(model: ModelConfig, vocab_size: int) -> GPT:
    with torch.device("meta"):
        built = GPT(
            ModelShape(model, vocab_size, vocab_size),
            TensorParallel(),
        )
    return built.to_empty(device="cpu").float().eval()


def _load_model(
    own: GPT, hf: HfModel, pairs: Sequence[TensorPair], numbers: Mapping[int, int]
) -> None:
    """Fill our parameters. `numbers` maps the layers of the folder to those of the model."""
    parameters: dict[str, Tensor] = dict(own.named_parameters())
    for router in list_routers(own):
        router.allocate(torch.device("cpu"))
        parameters[f"blocks.{router.layer}{BALANCE}"] = router.balance
    for pair in pairs:
        name = pair.name
        if pair.layer is not None:
            name = name.replace(f"blocks.{pair.layer}.", f"blocks.{numbers[pair.layer]}.", 1)
        parameters[name].data.copy_(pair.from_hf(hf.read(pair)))


def _load_hf_model(
    made: Any, hf: HfModel, pairs: Sequence[TensorPair], numbers: Mapping[int, int]
) -> Any:
    """Return their model with the folder's weights.

    Args:
        made: Their model. It is filled unless its files have other tensors.
        hf: The folder.
        pairs: The tensors to load.
        numbers: Layer of the folder -> layer of the model.
    """
    tensors = hf.architecture.join(_name_hf_tensors(hf, pairs, numbers), hf.model)
    if hf.architecture.converts_names:
        return _load_as_files(made, dict(tensors))
    parameters = dict(made.named_parameters())
    for name, tensor in tensors:
        _find_parameter(parameters, name, hf.architecture).data.copy_(tensor)
    return made


def _name_hf_tensors(
    hf: HfModel, pairs: Sequence[TensorPair], numbers: Mapping[int, int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield their tensors with their names in the model that is compared."""
    layers = hf.architecture.layers
    for pair in pairs:
        for name, tensor in zip(pair.hf_names, hf.read(pair), strict=True):
            if pair.layer is not None:
                name = name.replace(
                    f"{layers}.{pair.layer}.", f"{layers}.{numbers[pair.layer]}.", 1
                )
            yield name, tensor


def _load_as_files(made: Any, tensors: dict[str, Tensor]) -> Any:
    """Return their model, loaded by `transformers`, which joins and renames tensors of files.

    So the names of gate and up of an expert are compared with those of `transformers`.
    """
    logging = import_transformers().utils.logging
    before = logging.get_verbosity()
    # A model of one layer lacks the embedding's weights, which would be a warning.
    logging.set_verbosity_error()
    try:
        loaded = type(made).from_pretrained(
            None,
            config=made.config,
            state_dict=tensors,
            attn_implementation="eager",
            dtype=torch.float32,
        )
    finally:
        logging.set_verbosity(before)
    return loaded.eval()


def _find_parameter(
    parameters: Mapping[str, Tensor], name: str, architecture: Architecture
) -> Tensor:
    """Return a parameter of `transformers` by its name in files.

    Raises:
        CheckpointError: there is none.
    """
    # The class without a head has no prefix. GPT-NeoX's head has an older name in files.
    for candidate in (name, name.removeprefix(f"{architecture.base}."), _HEADS.get(name, "")):
        if candidate in parameters:
            return parameters[candidate]
    raise CheckpointError(f"this version of transformers has no tensor {name}")


_HEADS = {"embed_out.weight": "lm_head.weight"}


def _count_free_bytes() -> int:
    """Return the free memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
