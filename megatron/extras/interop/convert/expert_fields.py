"""Experts in classes of `transformers`: their fields, and the names of their tensors."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.model import ModelConfig
from megatron.extras.interop.convert.fields import (
    NO_EXPERTS,
    describe_expert_layers,
    make_refusal,
)
from megatron.model.shape import ModelShape

_SHARED = "moe_shared_expert_intermediate_size"
_READ = {
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_pre_softmax",
    _SHARED,
}
"""The fields that the classes here can express. The others must have their defaults."""


@dataclass(frozen=True)
class ExpertFields:
    """The experts of a class of `transformers`, and the width of its MLP."""

    number: str
    """Their field with the number of experts."""
    other_number: str
    """The field that other versions of `transformers` write instead."""
    normalised: bool = False
    """Whether the weights of a token's experts add up to 1. False: `norm_topk_prob` says so."""
    with_mlp: bool = False
    """Whether some layers may have an MLP, with a width of its own, as in Qwen 3."""
    shared: bool = False
    """Whether there is a shared expert with a gate, as in Qwen3-Next."""

    model_fields = (*NO_EXPERTS, "ffn_hidden_size")

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """See `Pair`."""
        if model.num_experts is None:
            raise ConfigError("the class has experts, and this model has none")
        # The shared expert of Qwen3-Next always has a gate.
        expected = NO_EXPERTS | {"moe_shared_expert_gate": self.shared}
        # Groups and sigmoid are parts of classes that are not converted.
        for name, value in expected.items():
            if name not in _READ and getattr(model, name) != value:
                raise make_refusal(model, name)
        if (getattr(model, _SHARED) is not None) != self.shared:
            raise make_refusal(model, _SHARED)
        found: dict[str, Any] = {
            self.number: model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
        }
        if self.shared:
            found["shared_expert_intermediate_size"] = getattr(model, _SHARED)
        if not self.normalised:
            found["norm_topk_prob"] = not model.moe_router_pre_softmax
        elif model.moe_router_pre_softmax:
            raise ConfigError("--moe-router-pre-softmax has no equivalent")
        # `decoder_sparse_step` and --moe-layer-freq count from other layers, so these are named.
        shape = ModelShape(model, 0, 0)
        dense = sorted(set(range(model.num_layers)) - shape.expert_layers)
        if self.with_mlp:
            return found | {
                "moe_intermediate_size": model.moe_ffn_hidden_size,
                "intermediate_size": model.ffn_hidden_size,
                "mlp_only_layers": dense,
                "decoder_sparse_step": 1,
            }
        if dense:
            raise make_refusal(model, "moe_layer_freq", ": all layers of the class have experts")
        return found | {"intermediate_size": model.moe_ffn_hidden_size}

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pair`."""
        layers = int(hf["num_hidden_layers"])
        number = int(hf[self.number] if self.number in hf else hf[self.other_number])
        chosen = int(hf["num_experts_per_tok"])
        if number < 2 or not 1 <= chosen <= number:
            raise ConfigError(
                f"num_experts_per_tok {chosen} of {number} experts is not supported here: there "
                "must be at least 2 experts, and a token uses 1 to all of them"
            )
        # A class without a list of layers has experts in all of them.
        with_experts = list(range(layers))
        if self.with_mlp:
            only = hf.get("mlp_only_layers") or []
            step = int(hf.get("decoder_sparse_step", 1))
            if step < 1:
                raise ConfigError(f"decoder_sparse_step {step} must be at least 1")
            with_experts = [at for at in with_experts if at not in only and (at + 1) % step == 0]
            if not with_experts:
                raise ConfigError(
                    f"mlp_only_layers {only} and decoder_sparse_step {step} leave no layer with "
                    "experts; a model without experts has another model_type"
                )
        width = hf[("intermediate_size", "moe_intermediate_size")[self.with_mlp]]
        shared: dict[str, Any] = {}
        if self.shared:
            shared[_SHARED] = int(hf["shared_expert_intermediate_size"])
            shared["moe_shared_expert_gate"] = True
        return shared | {
            "num_experts": number,
            "moe_router_topk": chosen,
            "moe_ffn_hidden_size": int(width),
            "moe_layer_freq": describe_expert_layers(with_experts, layers),
            "moe_router_pre_softmax": not (self.normalised or hf["norm_topk_prob"]),
            "ffn_hidden_size": int(hf["intermediate_size"]),
        }


@dataclass(frozen=True)
class ExpertPart:
    """Where a tensor of files is in one that belongs to all experts, or in one of another name."""

    number: int | None = None
    """Number of the expert. None: the other tensor has the same numbers."""
    rows: slice = field(default_factory=lambda: slice(None))
    """Rows of the expert's matrix, whose rows are the layer's outputs."""
    transposed: bool = False
    """Whether the tensor of all experts has these rows as its last dimension."""

    def get_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part of a tensor of this shape."""
        if self.number is None:
            return whole
        rows, *others = reversed(whole[1:]) if self.transposed else whole[1:]
        return (len(range(rows)[self.rows]), *others)

    def take(self, own: Tensor) -> Tensor:
        """Return the part of an expert's numbers."""
        return (own.t() if self.transposed and own.dim() == 2 else own)[self.rows]


@dataclass(frozen=True)
class ExpertNames:
    """Their names of the tensors of a mixture.

    Files have three matrices for each expert. A model of `transformers` 5 has two tensors for all
    experts, `gate_up_proj` [E, 2 f, h] and `down_proj` [E, h, f], and a state dict of it that was
    saved as it is has them too.
    """

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    module: str = "mlp"
    """The module of router and experts in files. In memory it is `mlp`."""

    @property
    def modules(self) -> dict[str, str]:
        """Our module -> theirs."""
        return {"mlp.router": f"{self.module}.gate"}

    def name_matrix(self, prefix: str, number: int, part: str) -> str:
        """Return the name in files of a matrix of one expert.

        Args:
            prefix: The name of the layer, with a dot at its end.
            number: Number of the expert.
            part: gate, up or down.
        """
        return f"{prefix}{self.module}.experts.{number}.{getattr(self, part)}.weight"

    def join(
        self, tensors: Iterable[tuple[str, Tensor]], number: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors as files have them.

        Args:
            tensors: Names and tensors, with one for each expert.
            number: Number of experts.
        """
        yield from tensors

    def divide(self, name: str, shape: tuple[int, ...]) -> dict[str, ExpertPart]:
        """Return the tensors of files that one tensor of a model in memory has.

        Args:
            name: Name of the tensor in memory.
            shape: Its shape.

        Returns:
            Name in files -> where its numbers are in the tensor. It is empty for a tensor that has
            the same name in both.
        """
        if match := re.fullmatch(r"(.*\.|)mlp\.experts\.(gate_up_proj|down_proj)", name):
            prefix, kind = match.groups()
            # The names that are expected are then missing, which is reported.
            if len(shape) != 3:
                return {}
            rows = shape[1]
            # All rows of an expert's gate come before those of its other factor.
            parts = {"down": slice(0, rows)}
            if kind == "gate_up_proj":
                parts = {"gate": slice(0, rows // 2), "up": slice(rows // 2, rows)}
            return {
                self.name_matrix(prefix, number, part): ExpertPart(number, own)
                for number in range(shape[0])
                for part, own in parts.items()
            }
        if self.module != "mlp" and (match := re.fullmatch(r"(.*\.|)mlp\.gate\.weight", name)):
            return {f"{match[1]}{self.module}.gate.weight": ExpertPart()}
        return {}


@dataclass(frozen=True)
class StackedExpertNames(ExpertNames):
    """Names of a class whose files have one tensor for all experts, as in gpt-oss.

    Matrices are [E, in, out]. The outputs of gate and up alternate. A file in MXFP4 has [E, out,
    in] in two tensors, which `HfTensors` reads as one.
    """

    @property
    def modules(self) -> dict[str, str]:
        """See `ExpertNames`."""
        return {"mlp.router": "mlp.router"}

    def name_matrix(self, prefix: str, number: int, part: str) -> str:
        """Return a name for a part of one expert. No file has it."""
        return f"{prefix}mlp.experts.{number}.{part}"

    def join(
        self, tensors: Iterable[tuple[str, Tensor]], number: int
    ) -> Iterator[tuple[str, Tensor]]:
        """See `ExpertNames`. The experts of a layer are in memory at a time."""
        found: dict[str, dict[str, list[Tensor]]] = {}
        for name, tensor in tensors:
            match = re.fullmatch(r"(.*\.mlp\.experts\.)\d+\.((gate|up|down)(_bias)?)", name)
            if match is None:
                yield name, tensor
                continue
            prefix, part, kind, bias = match.groups(default="")
            name, parts = f"{prefix}down_proj{bias}", [part]
            if kind != "down":
                name, parts = f"{prefix}gate_up_proj{bias}", [f"gate{bias}", f"up{bias}"]
            own = found.setdefault(name, {})
            own.setdefault(part, []).append(tensor)
            if sum(map(len, own.values())) == number * len(parts):
                # [E, parts, out, ...] to [E, out parts, ...].
                whole = torch.stack([torch.stack(own[each]) for each in parts], 2).flatten(1, 2)
                del found[name]
                yield name, (whole if bias else whole.transpose(1, 2)).contiguous()

    def divide(self, name: str, shape: tuple[int, ...]) -> dict[str, ExpertPart]:
        """See `ExpertNames`."""
        match = re.fullmatch(r"(.*\.|)mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|)", name)
        if match is None:
            return {}
        prefix, kind, end = match.groups()
        if len(shape) != (2 if end == "_bias" else 3):
            return {}
        bias = "_bias" if end == "_bias" else ""
        parts = {f"down{bias}": slice(None)}
        if kind == "gate_up":
            parts = {f"gate{bias}": slice(0, None, 2), f"up{bias}": slice(1, None, 2)}
        return {
            self.name_matrix(prefix, number, part): ExpertPart(number, own, transposed=not end)
            for number in range(shape[0])
            for part, own in parts.items()
        }
