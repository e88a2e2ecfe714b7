"""The comparison of one step that another trainer has recorded with the same step here.

The weights are those of a checkpoint, which was imported from the other trainer. A difference of
the forward pass is named by the first layer whose input differs. A difference of the backward pass
is named by one parameter: of those whose gradient differs, the one nearest to the loss.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.base.errors import ConfigError, DataError
from megatron.base.outside_file import load_json
from megatron.checkpoint.load import Checkpoint
from megatron.extras.inference.generate.load import load_model
from megatron.extras.interop.convert.architectures import ARCHITECTURES
from megatron.extras.interop.convert.megatron_names import rename
from megatron.extras.interop.convert.tensors import TensorPair, pair_tensors
from megatron.extras.interop.convert.trainer_files import (
    FMS_LLAMA,
    NANOGPT,
    choose_llm_baselines_names,
    strip_wrappers,
)
from megatron.model.gpt import GPT
from megatron.model.shape import ModelShape

_BLOCKS = "blocks."
_IN_LAYER = {
    "self_attention.core_attention.softmax_offset": "attention.sink",
    "self_attention.in_proj.weight": "attention.in.weight",
    "self_attention.conv1d.weight": "attention.convolution",
    "self_attention.A_log": "attention.A_log",
    "self_attention.dt_bias": "attention.dt_bias",
    "self_attention.out_norm.weight": "attention.norm.weight",
    "self_attention.out_proj.weight": "attention.out.weight",
}
"""Name of Megatron-LM in a layer -> ours, of what is not imported from there."""
_JOINED = {
    r"\bmlp\.(gate|up)\.": "mlp.in.",
    r"\battention\.(query|key|value|gate|beta|alpha)\.": "attention.in.",
    r"\battention\.(query|key|value)_convolution": "attention.convolution",
}
"""Our names of what is one tensor in Megatron-LM, and its name."""
_SMALL = 1e-6
"""A difference is divided by our norm, and at least by this share of the norm of all gradients."""


@dataclass(frozen=True)
class OtherStep:
    """One step of another trainer, before its optimizer."""

    tokens: Tensor
    """The samples, int64[b, s + 1]. Each token is to be predicted from those before it."""
    loss: float
    """The mean of cross entropy over all b x s tokens."""
    gradients: dict[str, float]
    """Their name of a parameter -> Euclidean norm of its gradient, before clipping."""
    inputs: list[float]
    """Root mean square of the input of each layer. It may be empty."""
    norm: float | None
    """Their norm of all gradients, by which they are clipped."""


@dataclass(frozen=True)
class ComparedNumber:
    """A number of the step, here and there."""

    name: str
    theirs: float
    ours: float
    difference: float
    """Relative difference."""


@dataclass(frozen=True)
class StepComparison:
    """All numbers in the order in which a step computes them."""

    numbers: tuple[ComparedNumber, ...]
    bound: float
    missing: tuple[str, ...]
    """Parameters without a recorded gradient."""

    @property
    def first(self) -> ComparedNumber | None:
        """The first number that differs."""
        return next((each for each in self.numbers if not each.difference <= self.bound), None)


def read_step(path: Path) -> OtherStep:
    """Read a recorded step.

    Raises:
        DataError: The file has another form.
    """
    try:
        found: Any = load_json(path)
        step = OtherStep(
            torch.tensor(found["tokens"], dtype=torch.int64),
            float(found["loss"]),
            {strip_wrappers(name): float(norm) for name, norm in found["gradients"].items()},
            [float(each) for each in found.get("inputs", [])],
            found.get("norm") and float(found["norm"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DataError(
            f"{path} cannot be read as a step: {error!r}. It must be JSON with tokens, loss and "
            "gradients, see docs/verify.md."
        ) from error
    if step.tokens.dim() != 2 or step.tokens.shape[1] < 2 or not len(step.tokens):
        raise DataError(
            f"{path}: tokens has the shape {list(step.tokens.shape)}, and must be a list of "
            "samples of one length, with at least two tokens each."
        )
    return step


def compare_step(step: OtherStep, checkpoint: Checkpoint, bound: float) -> StepComparison:
    """Compute the step with the weights of a checkpoint, in fp32, and compare it.

    Raises:
        ConfigError: The step has parameters or tokens that the model lacks.
        CheckpointError: The checkpoint is damaged.
    """
    model = load_model(checkpoint)
    # An id above the table would fail inside of torch.
    rows = model.shape.vocab_size
    least, largest = int(step.tokens.min()), int(step.tokens.max())
    if least < 0 or largest >= rows:
        raise ConfigError(
            f"the step has token ids from {least} to {largest}, and they must be 0 to {rows - 1}."
        )
    layers = len(model.get_blocks())
    if step.inputs and len(step.inputs) != layers:
        raise ConfigError(
            f"the step has the inputs of {len(step.inputs)} layers, and the model has {layers}."
        )
    renamed = _rename_megatron(step.gradients.keys())
    pairs = []
    # Wrong names are an error before the step is computed.
    if not renamed:
        pairs = _pair_names(model.shape, step.gradients.keys())
    inputs, loss = _run(model, step.tokens)
    ours = _list_own_norms(model, renamed)
    if not renamed:
        ours = _list_norms(model, pairs)
    # Tiny gradients, such as those of the biases of keys, are rounding errors.
    total = math.hypot(*ours.values())
    numbers = [
        _compare(f"input of layer {number}", theirs, own)
        for number, (theirs, own) in enumerate(zip(step.inputs, inputs, strict=False))
    ]
    numbers.append(_compare("loss", step.loss, loss))
    # The backward pass begins at the head. A tied embedding is complete at its end.
    numbers += [
        _compare(f"gradient of {name}", step.gradients[name], norm, _SMALL * total)
        for name, norm in reversed(ours.items())
        if name in step.gradients
    ]
    if step.norm is not None:
        numbers.append(_compare("norm of all gradients", step.norm, total))
    missing = tuple(name for name in ours if name not in step.gradients)
    return StepComparison(tuple(numbers), bound, missing)


def _compare(name: str, theirs: float, ours: float, least: float = 0.0) -> ComparedNumber:
    return ComparedNumber(name, theirs, ours, abs(theirs - ours) / max(abs(ours), least, 1e-30))


def _run(model: GPT, tokens: Tensor) -> tuple[list[float], float]:
    """Return the root mean square of the input of each layer, and the loss. Fill the gradients."""
    sizes: list[float] = []
    for block in model.get_blocks().values():
        block.register_forward_pre_hook(
            lambda _, given: sizes.append(float(given[0].detach().square().mean().sqrt()))
        )
    logits = model.compute_logits(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return sizes, float(loss.detach())


def _pair_names(shape: ModelShape, recorded: Collection[str]) -> list[TensorPair]:
    """Return our tensors with the names of the trainer that recorded the step.

    Raises:
        ConfigError: The recorded names are those of no trainer that is known, or there are none.
    """
    if not recorded:
        raise ConfigError("gradients is empty. Give the norm of each parameter's gradient.")
    fewest: list[str] = []
    # Names tell the trainer, so no flag is needed for it.
    known = (NANOGPT, choose_llm_baselines_names(shape.config), FMS_LLAMA, *ARCHITECTURES)
    for architecture in known:
        try:
            pairs = pair_tensors(architecture, shape)
        # Another kind of model has other parts.
        except ConfigError:
            continue
        names = {name for pair in pairs for name in pair.hf_names}
        unknown = sorted({*recorded} - names)
        if not unknown:
            return pairs
        fewest = min(fewest or unknown, unknown, key=len)
    raise ConfigError(
        f"gradients has {len(recorded)} names, of which the model lacks {', '.join(fewest[:3])}. "
        "Give those of transformers, Megatron-LM, nanoGPT, llm-baselines or fms-fsdp."
    )


def _rename_megatron(recorded: Collection[str]) -> dict[str, str]:
    """Return our name -> Megatron-LM's, or nothing if the names are those of another trainer."""
    names = {}
    for name in recorded:
        found = rename(name)
        match = re.fullmatch(r".*\blayers\.(\d+)\.(.+)", name)
        if match is not None and match[2] in _IN_LAYER:
            found = int(match[1]), _IN_LAYER[match[2]]
        if found is None:
            return {}
        layer, inside = found
        # A tensor outside of the layers has no number.
        if layer is not None:
            inside = f"{_BLOCKS}{layer}.{inside}"
        names[inside] = name
    return names


def _list_own_norms(model: GPT, renamed: Mapping[str, str]) -> dict[str, float]:
    """Return the norm of each gradient by Megatron-LM's names. Its rows have our order."""
    norms: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, "each parameter has a gradient"
        norm = float(parameter.grad.double().norm())
        own = name
        for pattern, joined in _JOINED.items():
            own = re.sub(pattern, joined, own)
        theirs = renamed.get(own, own)
        norms[theirs] = math.hypot(norms.get(theirs, 0.0), norm)
    return norms


def _list_norms(model: GPT, pairs: Sequence[TensorPair]) -> dict[str, float]:
    """Return the norm of each gradient by their names, in the order of the model."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # Rows that only pad the vocabulary have no gradient.
    norms = {}
    for pair in pairs:
        gradient = gradients[pair.name]
        assert gradient is not None, "each parameter has a gradient"
        parts = pair.to_hf(gradient[: pair.shape[0]])
        for name, part in zip(pair.hf_names, parts, strict=True):
            norms[name] = float(part.double().norm())
    return norms


def describe_step(found: StepComparison) -> str:
    """Return the comparison for people."""
    lines = [f"{'number':64} {'there':>12} {'here':>12} {'difference':>10}"]
    # The largest differences show where to look, and the first one where it begins.
    worst = sorted(found.numbers, key=lambda each: -each.difference)[:8]
    shown = [each for each in found.numbers if each in worst or each.name == "loss"]
    lines += [
        f"{each.name:64} {each.theirs:12.6g} {each.ours:12.6g} {each.difference:10.1e}"
        for each in shown
    ]
    if found.missing:
        lines.append(f"{len(found.missing)} parameters have no recorded gradient")
    first = found.first
    if first is None:
        lines.append(f"equal: all {len(found.numbers)} numbers differ by at most {found.bound:g}")
    else:
        lines.append(f"DIFFERENT from here on, in the order of a step: {first.name}")
    return "\n".join(lines)


def build_json(found: StepComparison) -> str:
    """Return the comparison as JSON."""
    numbers = [vars(each) for each in found.numbers]
    first = getattr(found.first, "name", None)
    return json.dumps({"first": first, "bound": found.bound, "numbers": numbers}, indent=1)
