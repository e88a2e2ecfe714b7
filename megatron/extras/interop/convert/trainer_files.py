"""Checkpoints of nanoGPT, llm-baselines and fms-fsdp: names, tensors, states and counters.

Invariant: nothing in the files is run (`unpickle.py`). Sources: nanoGPT's model.py, llm-baselines'
models/base.py and models/llama.py, and the Llama of ibm-fms, which fms-fsdp trains, in the
versions before and after 1.0.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.architectures import Architecture, find_architecture
from megatron.extras.interop.convert.megatron_names import flatten_tensors
from megatron.extras.interop.convert.tensors import TensorPair
from megatron.extras.interop.convert.unpickle import DistributedTensors, load_pickle_file
from megatron.model.layer_parts import get_activation
from megatron.model.shape import ModelShape
from megatron.parallel.shard import ADAM_KINDS, Kind

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a weight -> shape."""
NANOGPT = dataclasses.replace(
    # The names are those of transformers' GPT-2, whose matrices are transposed.
    find_architecture("gpt2"),
    model_type="the GPT of nanoGPT and llm-baselines",
    class_name="GPT",
    transposed=frozenset(),
)
_LLAMA_OF_LLM_BASELINES = dataclasses.replace(
    NANOGPT,
    model_type="the Llama of llm-baselines",
    class_name="Llama",
    modules={
        "embedding.word": "transformer.wte",
        "head": "lm_head",
        "head.norm": "transformer.ln_f",
        "input_norm": "ln_1",
        "post_attention_norm": "ln_2",
        "attention.out": "attn.c_proj",
        # Their w1 is the gate. In ibm-fms, below, w1 is the other matrix.
        "mlp.gate": "mlp.w1",
        "mlp.up": "mlp.w2",
        "mlp.down": "mlp.c_proj",
    },
)
FMS_LLAMA = Architecture(
    "the Llama of ibm-fms",
    "LLaMA",
    (),
    {
        "embedding.word": "embedding",
        "head": "head",
        "head.norm": "dec_norm",
        "input_norm": "ln",
        "post_attention_norm": "ff_ln",
        "attention.out": "attn.dense",
        "mlp.gate": "ff_sub_layer.wg",
        "mlp.up": "ff_sub_layer.w1",
        "mlp.down": "ff_sub_layer.w2",
    },
    "layers",
    ("attn.in_proj.qkv_fused",),
    "thirds",
    not_stored=(r".*rot_emb\..*",),
)
# A name can have several of them, one inside the other.
_WRAPPERS = re.compile(r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, FSDP, recomputation and data parallelism put into names."""


def strip_wrappers(name: str) -> str:
    """Return the name of a tensor in the model itself."""
    return _WRAPPERS.sub("", name)


def choose_llm_baselines_names(model: ModelConfig) -> Architecture:
    """Return the names of `--model base` or `--model llama`."""
    if not get_activation(model).gated:
        return NANOGPT
    return _LLAMA_OF_LLM_BASELINES


@dataclass(frozen=True)
class StoredParts:
    """Where the numbers of one of their tensors lie in the file."""

    names: tuple[str, ...]
    """The stored tensors, whose rows follow each other."""
    half: int | None = None
    """0 or 1 if it is the first or the second half of the rows. None: all of them."""

    def find_shape(self, shapes: Shapes) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        stored = [shapes[name] for name in self.names]
        rows = sum(shape[0] for shape in stored)
        if self.half is not None:
            rows //= 2
        return (rows, *stored[0][1:])

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the tensor."""
        parts = [read(name) for name in self.names]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.half is None:
            return whole
        return whole.chunk(2)[self.half]


# Before version 1.0, the embedding and the head were one shared module.
_FMS_OUTSIDE = {"shared.emb.weight": "embedding.weight", "shared.head.weight": "head.weight"}
_FMS_GATED = re.compile(r"(.*\.ff_sub_layer)\.wg1_fused\.(.*)")
_FMS_QUERY = re.compile(r"(.*\.attn)(\.in_proj)?\.query\.(.*)")
_FMS_KEY_VALUE = re.compile(r".*\.attn(\.in_proj)?\.(key|value)\..*")


def find_fms_parts(stored: Sequence[str]) -> dict[str, StoredParts]:
    """Return where the tensors of `FMS_LLAMA` lie, from the names of any version of ibm-fms.

    The matrices of queries, keys and values are fused, or were separate in old versions. So are the
    gate and the matrix beside it.
    """
    found: dict[str, StoredParts] = {}
    for name in stored:
        # Since 1.0, the class with a head keeps the layers in `base_model`.
        plain = _FMS_OUTSIDE.get(name, name.removeprefix("base_model."))
        if gated := _FMS_GATED.fullmatch(plain):
            # The gate comes first in the fused matrix.
            found[f"{gated[1]}.wg.{gated[2]}"] = StoredParts((name,), half=0)
            found[f"{gated[1]}.w1.{gated[2]}"] = StoredParts((name,), half=1)
        # The three are read together when the query is found, so key and value are passed over.
        elif query := _FMS_QUERY.fullmatch(plain):
            parts = tuple(
                f"{part}.{query[3]}".join(name.rsplit(f"query.{query[3]}", 1))
                for part in ("query", "key", "value")
            )
            found[f"{query[1]}.in_proj.qkv_fused.{query[3]}"] = StoredParts(parts)
        elif not _FMS_KEY_VALUE.fullmatch(plain):
            found[plain] = StoredParts((name,))
    return found


def separate_rotary_halves(pair: TensorPair, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Return queries and keys in our order of channels. Other tensors stay as they are.

    The Llamas of llm-baselines and ibm-fms rotate channels 0 and 1, 2 and 3, and so on. Here,
    channel i of the first half is rotated with channel i of the second half.

    Args:
        pair: The tensor.
        tensor: Rows of queries, keys and values, in our order of heads.
        shape: Sizes of the model.
    """
    if pair.rows is None:
        return tensor
    groups, heads, width = pair.rows
    # With a part of the channels, pairs would lie in that part only.
    if shape.rotary_dim != width:
        raise ConfigError(
            f"--rotary-percent {shape.config.rotary_percent} is not possible here: these models "
            "rotate all channels of a head"
        )
    # In each group: the queries, the key, the value. The value is not rotated.
    by_group = tensor.reshape(groups, heads + 2, width, *tensor.shape[1:])
    rotated = by_group[:, :-1].unflatten(2, (width // 2, 2)).transpose(2, 3).flatten(2, 3)
    return torch.cat((rotated, by_group[:, -1:]), dim=1).flatten(0, 2)


def order_nanogpt_states(shapes: Shapes) -> list[list[str]]:
    """Return the parameters of each group of nanoGPT's optimizer, in their order.

    Those with weight decay come first. These are all matrices.
    """
    matrices = [name for name, size in shapes.items() if len(size) >= 2]
    others = [name for name, size in shapes.items() if len(size) < 2]
    return [matrices, others]


def order_llm_baselines_states(shapes: Shapes) -> list[list[str]]:
    """Return the parameters of each group of llm-baselines' optimizer, in their order.

    Those with weight decay come first. These are the matrices of the layers. The names are sorted
    as text, so layer 10 comes before layer 2.
    """
    decayed = {name for name, size in shapes.items() if len(size) >= 2 and ".h." in name}
    return [sorted(decayed), sorted(shapes.keys() - decayed)]


_WITHOUT_STATES = "give --weights-only"


@dataclass(frozen=True)
class TrainerCheckpoint:
    """A checkpoint of another trainer."""

    path: Path
    shapes: Shapes
    """The weights by their names in the model."""
    read: Callable[[Kind, str], Tensor]
    """Returns a weight or one of its moments."""
    iteration: int
    steps: int | None = None
    """Steps of the optimizer's states. None if there are none that are imported."""
    tokens: int | None = None
    """Consumed tokens. None if the file does not say."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run, if the file has them."""


def open_nanogpt(path: Path, *, weights_only: bool) -> TrainerCheckpoint:
    """Open a checkpoint of nanoGPT.

    Args:
        path: ckpt.pt, or its folder.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: there is none, it is damaged or contains what is not allowed, or it has
            other contents.
    """
    path = _find_file(path, ("ckpt.pt",))
    state = _read_dictionary(path, ("model", "model_args", "iter_num", "config"))
    # A resumed run has sizes of the model in `config` that it did not use. `model_args` has the
    # right ones.
    settings = {**_read_mapping(path, state, "config"), **_read_mapping(path, state, "model_args")}
    order = None if weights_only else order_nanogpt_states
    return _open_file(path, state, _read_count(path, state, "iter_num"), order, settings)


def open_llm_baselines(path: Path, *, weights_only: bool) -> TrainerCheckpoint:
    """Open a checkpoint of llm-baselines.

    Args:
        path: main.pt, or ckpt.pt of older versions, or its folder.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: see `open_nanogpt`.
    """
    path = _find_file(path, ("main.pt", "ckpt.pt"))
    state = _read_dictionary(path, ("model", "itr"))
    order = None if weights_only else order_llm_baselines_states
    return _open_file(path, state, _read_count(path, state, "itr"), order, {})


def open_fms(path: Path, *, weights_only: bool) -> TrainerCheckpoint:
    """Open a checkpoint of fms-fsdp.

    Args:
        path: A folder step_N_ckp, or a file step_N_ckp.pth or consolidated.00.pth.
        weights_only: Leave out the optimizer's states.

    Raises:
        CheckpointError: see `open_nanogpt`.
    """
    if path.is_dir():
        return _open_fms_folder(path, weights_only=weights_only)
    state = _read_dictionary(path, ("model_state",))
    # A single file has weights only, so there are no states to leave out.
    weights = _read_weights(path, state, "model_state")
    return _open_fms_names(
        path,
        {name: tuple(tensor.shape) for name, tensor in weights.items()},
        lambda kind, name: weights[name],
        state,
        None,
    )


def _find_file(path: Path, names: tuple[str, ...]) -> Path:
    """Return the file of a checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        return path
    for name in names:
        if (path / name).is_file():
            return path / name
    raise CheckpointError(f"{path} has no {' and no '.join(names)}; give the checkpoint's folder")


def _read_dictionary(path: Path, keys: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the contents of a file.

    Raises:
        CheckpointError: it is missing or damaged, contains what is not allowed, or lacks a key.
    """
    state = load_pickle_file(path)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} must have a dictionary, and has {type(state).__name__}")
    missing = [key for key in keys if key not in state]
    if missing:
        found = ", ".join(map(str, state)) or "nothing"
        raise CheckpointError(f"{path} has no {', '.join(missing)}; it has {found}")
    return state


def _read_mapping(path: Path, state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a dictionary of a file.

    Raises:
        CheckpointError: it is not a dictionary.
    """
    found = state[key]
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path}: {key} must be a dictionary, and is {type(found).__name__}")
    return found


def _read_weights(path: Path, state: Mapping[str, Any], key: str) -> dict[str, Tensor]:
    """Return the weights of a file, by their names in the model.

    Raises:
        CheckpointError: they are not in a dictionary.
    """
    found = flatten_tensors(_read_mapping(path, state, key))
    return {strip_wrappers(name): tensor for name, tensor in found.items()}


def _read_count(path: Path, state: Mapping[str, Any], key: str) -> int:
    """Return a counter of a file.

    Raises:
        CheckpointError: it is no number, or negative.
    """
    found = state[key]
    # A counter may be a tensor.
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    # NaN and infinity fail this comparison too, and `int` could not convert them.
    if not isinstance(found, int | float) or not 0 <= found < 2**63:
        raise CheckpointError(f"{path}: {key} must be a count, and is {found}")
    return int(found)


def _open_file(
    path: Path,
    state: Mapping[str, Any],
    iteration: int,
    order: Callable[[Shapes], list[list[str]]] | None,
    settings: Mapping[str, Any],
) -> TrainerCheckpoint:
    """Return the checkpoint in a file with `model` and `optimizer`.

    Args:
        path: The file, for messages.
        state: Its contents.
        iteration: The iteration.
        order: Returns the parameters of the optimizer's groups. None leaves out its states.
        settings: Settings of the run.

    Raises:
        CheckpointError: the optimizer's states do not belong to these weights.
    """
    weights = _read_weights(path, state, "model")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    tensors: dict[Kind, Mapping[str, Tensor]] = {"weight": weights}
    steps = None
    if order is not None:
        trained = {
            name: shape for name, shape in shapes.items() if not _is_copy_or_mask(name, weights)
        }
        states, steps = _match_states(path, state.get("optimizer"), order(trained), trained)
        tensors |= states
    return TrainerCheckpoint(
        path,
        shapes,
        lambda kind, name: tensors[kind][name],
        iteration,
        steps,
        settings=settings,
    )


def _is_copy_or_mask(name: str, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor is no parameter of its own: a tied head or a causal mask."""
    # The state of AdamW has neither, so counting them would shift all that follow.
    if name.endswith(".attn.bias"):
        return True
    word = weights.get("transformer.wte.weight")
    return name == "lm_head.weight" and word is not None and torch.equal(word, weights[name])


def _match_states(
    path: Path, optimizer: Any, groups: list[list[str]], shapes: Shapes
) -> tuple[dict[Kind, Mapping[str, Tensor]], int]:
    """Return the moments of each parameter, and the number of steps.

    torch numbers the parameters by groups, and does not store their names.

    Raises:
        CheckpointError: groups, shapes or states are not those of AdamW for these parameters.
    """
    try:
        # Any part may be missing or of another kind, and each gives another error.
        sizes = [len(group["params"]) for group in optimizer["param_groups"]]
        numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
        states = [optimizer["state"][number] for number in numbers]
        steps = {int(each["step"]) for each in states}
        moments: dict[Kind, list[Tensor]] = {
            kind: [each[kind] for each in states] for kind in ADAM_KINDS
        }
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{path} has no states of AdamW ({error!r}); {_WITHOUT_STATES}"
        ) from error
    names = [name for group in groups for name in group]
    expected = [shapes[name] for name in names]
    found = [tuple(tensor.shape) for tensor in moments["exp_avg"]]
    # A further state, such as AdEMAMix's third moment, means another optimizer.
    others = {key for each in states for key in each} - {"step", *ADAM_KINDS}
    # Shapes are the only check of the order, so every one of them must agree.
    if sizes != [len(group) for group in groups] or found != expected or others:
        raise CheckpointError(
            f"{path}: the optimizer's states are not those of AdamW with one group of parameters "
            f"with weight decay and one without, in the order of this version; {_WITHOUT_STATES}"
        )
    # Our optimizer has one count of steps.
    if len(steps) != 1:
        raise CheckpointError(
            f"{path}: the parameters have different numbers of steps ({sorted(steps)}); "
            f"{_WITHOUT_STATES}"
        )
    return {kind: dict(zip(names, moments[kind], strict=True)) for kind in ADAM_KINDS}, steps.pop()


_MODEL = "model_state."
_STATES = "optimizer_state.state."


def _open_fms_folder(folder: Path, *, weights_only: bool) -> TrainerCheckpoint:
    """Return the checkpoint in a folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or contains what is not allowed.
    """
    tensors = DistributedTensors(folder)
    # fms-fsdp writes its counters beside the tensors, not among them.
    metadata = _read_dictionary(folder / "metadata.pth", ("step",))
    # Name in the model -> name in the folder.
    stored: dict[Kind, dict[str, str]] = {"weight": {}, "exp_avg": {}, "exp_avg_sq": {}}
    step_of: str | None = None
    for name in tensors.sizes:
        if name.startswith(_MODEL):
            stored["weight"][strip_wrappers(name.removeprefix(_MODEL))] = name
        elif name.startswith(_STATES):
            parameter, _, leaf = name.removeprefix(_STATES).rpartition(".")
            if leaf in ADAM_KINDS:
                stored[leaf][strip_wrappers(parameter)] = name
            # torch stores the count once for each parameter. All are equal.
            elif leaf == "step":
                step_of = name
    steps = None
    if not weights_only:
        if step_of is None or any(
            stored[kind].keys() != stored["weight"].keys() for kind in ADAM_KINDS
        ):
            raise CheckpointError(
                f"{folder} has no states of AdamW for all weights; {_WITHOUT_STATES}"
            )
        steps = int(tensors.read(step_of))
    return _open_fms_names(
        folder,
        {name: tuple(tensors.sizes[theirs]) for name, theirs in stored["weight"].items()},
        lambda kind, name: tensors.read(stored[kind][name]),
        metadata,
        steps,
    )


def _open_fms_names(
    path: Path,
    shapes: Shapes,
    read: Callable[[Kind, str], Tensor],
    metadata: Mapping[str, Any],
    steps: int | None,
) -> TrainerCheckpoint:
    """Return a checkpoint with the names of `FMS_LLAMA`.

    Raises:
        CheckpointError: one of three tensors that belong together is missing.
    """
    parts = find_fms_parts(list(shapes))
    # Old versions have queries, keys and values apart. The names are made from the query's.
    for each in parts.values():
        for name in each.names:
            if name not in shapes:
                raise CheckpointError(f"{path}: {name} is missing")
    iteration = 0
    tokens = None
    if "step" in metadata:
        iteration = _read_count(path, metadata, "step")
    if "tokens_seen" in metadata:
        tokens = _read_count(path, metadata, "tokens_seen")
    return TrainerCheckpoint(
        path,
        {name: each.find_shape(shapes) for name, each in parts.items()},
        lambda kind, name: parts[name].read(lambda stored: read(kind, stored)),
        iteration,
        steps,
        tokens,
    )
