"""A folder in the format of Hugging Face: its configuration, its tensors, and how they are written.

Tensors are read one by one, so that the memory does not depend on the size of the model. Nothing in
such a folder is run.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.base.errors import CheckpointError, ConfigError
from megatron.base.outside_file import SETTINGS_BYTES, check_regular, load_json
from megatron.extras.interop.convert.architectures import Architecture
from megatron.extras.interop.convert.expert_fields import ExpertPart
from megatron.extras.interop.convert.packed import RowPart
from megatron.extras.interop.convert.quantised import (
    FP8_SCALES,
    FP8_SIDE,
    MXFP4_BLOCKS,
    MXFP4_BYTES,
    MXFP4_NUMBERS,
    MXFP4_SCALES,
    list_scales,
    read_fp8,
    read_mxfp4,
)
from megatron.extras.interop.convert.tensors import divide_by_size, refuse_problems

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of the format."""
_ADOPTED_CODE = {
    f"{file}.Deepseek{version}{end}"
    for version in ("V2", "V3")
    for file, end in (
        ("configuration_deepseek", "Config"),
        ("modeling_deepseek", "Model"),
        ("modeling_deepseek", "ForCausalLM"),
    )
}
"""Classes that come with published models, and whose function is now one of `transformers`' own."""
_MAX_LAYERS = 2000
"""Largest number of layers that is accepted."""
Divide = Callable[[str, tuple[int, ...]], Mapping[str, ExpertPart | RowPart]]


class HfTensors:
    """The tensors of a folder, by name.

    A tensor of all experts, as `transformers` has it in memory, counts as one for each expert. One
    with several parameters of this trainer counts as one for each of them.
    """

    def __init__(self, folder: Path, divide: Divide | None = None) -> None:
        """Find the files of all tensors.

        Args:
            folder: The folder.
            divide: Returns the parts of a tensor of a name and a shape. See `Architecture.divide`.
                Default: no tensor has parts.

        Raises:
            CheckpointError: a file is missing or damaged, or the tensors are not safetensors.
        """
        self._folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, str] = {}
        self._dtypes: dict[str, str] = {}
        self._whole: dict[str, tuple[str, ExpertPart | RowPart]] = {}
        """Name of a part -> the tensor that has it, and where it is in it."""
        self._scaled: set[str] = set()
        """Names of weights in FP8."""
        for name in _find_files(folder):
            with self._open(name) as file:
                for key in file.keys():  # noqa: SIM118 - it is no dictionary
                    if key in self._files:
                        raise CheckpointError(
                            f"{folder}: {key} is in {self._files[key]} and in {name}"
                        )
                    self._files[key] = name
                    found = file.get_slice(key)
                    self.shapes[key] = tuple(found.get_shape())
                    self._dtypes[key] = found.get_dtype()
        for key in [key for key in self.shapes if key.endswith(FP8_SCALES)]:
            self._join_scales(key)
        if divide is not None:
            for key in [key for key in self.shapes if key.endswith(MXFP4_BLOCKS)]:
                self._join_blocks(key)
            parts = {key: divide(key, shape) for key, shape in self.shapes.items()}
            for key, own in parts.items():
                self._divide(key, own)

    def _join_scales(self, scales: str) -> None:
        """Count a weight in FP8 and its scales as one tensor in bf16, if they fit together."""
        weight = scales.removesuffix(FP8_SCALES)
        kinds = self._dtypes.get(weight), self._dtypes[scales]
        shape = self.shapes.get(weight, ())
        # A scale of another form would be applied wrongly, so the dtype is refused later.
        fits = len(shape) == 2 and self.shapes[scales] == list_scales(shape)
        if fits and kinds == ("F8_E4M3", "F32"):
            del self.shapes[scales]
            self._dtypes[weight] = "BF16"
            self._scaled.add(weight)

    def _join_blocks(self, blocks: str) -> None:
        """Count blocks in MXFP4 and their scales as one tensor in bf16, if they fit together."""
        scales = blocks.removesuffix(MXFP4_BLOCKS) + MXFP4_SCALES
        shape = self.shapes[blocks]
        kinds = self._dtypes[blocks], self._dtypes.get(scales)
        if kinds == ("U8", "U8") and shape == (*self.shapes[scales], MXFP4_BYTES):
            del self.shapes[scales]
            self.shapes[blocks] = (*shape[:-2], shape[-2] * MXFP4_NUMBERS)
            self._dtypes[blocks] = "BF16"

    def _divide(self, whole: str, parts: Mapping[str, ExpertPart | RowPart]) -> None:
        """Put the parts of a tensor in its place.

        Raises:
            CheckpointError: the folder has a part twice.
        """
        if not parts:
            return
        shape = self.shapes.pop(whole)
        for name, part in parts.items():
            if name in self.shapes:
                raise CheckpointError(
                    f"{self._folder} has {name}, and {whole} with the same weights; keep one of "
                    "them"
                )
            self._whole[name] = whole, part
            self._dtypes[name] = self._dtypes[whole]
            self.shapes[name] = part.get_shape(shape)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """Return a tensor in the dtype of its file, or its rows from `rows[0]` to `rows[1] - 1`.

        Raises:
            CheckpointError: the file was removed or damaged since.
        """
        whole, part = self._whole.get(name, (name, ExpertPart()))
        if whole in self._scaled:
            found = part.take(self._read_scaled(whole))
            if rows is None:
                return found
            return found[slice(*rows)]
        with self._open(self._files[whole]) as file:
            if isinstance(part, RowPart):
                return part.take(file.get_tensor(whole))
            if part.number is not None:
                own = file.get_slice(whole)[part.number]
                if whole.endswith(MXFP4_BLOCKS):
                    own = read_mxfp4(own, self._read_scales(whole, part.number))
                return part.take(own)
            if rows is None:
                return file.get_tensor(whole)
            begin, end = rows
            return file.get_slice(whole)[begin:end]

    def _read_scaled(self, name: str) -> Tensor:
        """Return a weight in FP8 as bf16. Its scales may be in another file."""
        found = []
        for each in (name, name + FP8_SCALES):
            with self._open(self._files[each]) as file:
                found.append(file.get_tensor(each))
        return read_fp8(*found)

    def _read_scales(self, blocks: str, number: int) -> Tensor:
        """Return the scales of one expert's blocks. They may be in another file."""
        scales = blocks.removesuffix(MXFP4_BLOCKS) + MXFP4_SCALES
        with self._open(self._files[scales]) as file:
            return file.get_slice(scales)[number]

    def describe_problem(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return why a tensor cannot be a weight of this shape. None if it can."""
        if name not in self.shapes:
            return f"{name} is missing"
        if self.shapes[name] != shape:
            return f"{name} has the shape {self.shapes[name]}, and must have {shape}"
        # Quantised weights, for example, need a scale as well.
        if self._dtypes[name] not in _DTYPES.values():
            return f"{name} is {self._dtypes[name]}, and must be {', '.join(_DTYPES.values())}"
        return None

    def _open(self, name: str) -> Any:
        try:
            check_regular(self._folder / name)
            return safe_open(self._folder / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._folder / name} cannot be read: {error}") from error


def _find_files(folder: Path) -> list[str]:
    """Return the names of the tensor files.

    Raises:
        CheckpointError: there are none, or one is missing.
    """
    if (folder / _INDEX).is_file():
        try:
            named = load_json(folder / _INDEX)["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"{folder / _INDEX} cannot be read: {error!r}") from error
        if not all(isinstance(name, str) for name in named):
            raise CheckpointError(f"{folder / _INDEX} names a file that is not text")
        files = sorted(set(named))
    elif (folder / _SINGLE).is_file():
        files = [_SINGLE]
    elif list(folder.glob("*.bin")):
        raise CheckpointError(
            f"{folder} has its tensors in pickle files (*.bin), which can run code, so they are "
            "not read. Load the model with transformers, write it with save_pretrained, and import "
            "that folder"
        )
    else:
        raise CheckpointError(
            f"{folder} has no {_SINGLE} and no {_INDEX}; give a folder that save_pretrained of "
            "transformers has written"
        )
    for name in files:
        # A name with a folder in it could read files elsewhere.
        if Path(name).name != name:
            raise CheckpointError(f"{folder / _INDEX} names {name}, which is not in this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}, which its index names")
    return files


def read_config(folder: Path) -> Any:
    """Return the configuration of a folder, an object of `transformers`.

    Raises:
        CheckpointError: it is missing, damaged, or needs code that comes with the model.
        ConfigError: `transformers` is not installed.
    """
    path = folder / "config.json"
    if not folder.exists():
        raise CheckpointError(
            f"{path} cannot be read: the folder does not exist; correct the path, or download a "
            "model of the Hub with hf download ORGANIZATION/NAME --local-dir FOLDER"
        )
    if not path.exists():
        raise CheckpointError(
            f"{path} cannot be read: there is no such file; give a folder that save_pretrained of "
            "transformers has written"
        )
    try:
        fields = load_json(path, SETTINGS_BYTES)
        needs_code = not set(fields.get("auto_map", {}).values()) <= _ADOPTED_CODE
        _check_layers(path, fields)
    except (AttributeError, OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if needs_code:
        raise CheckpointError(
            f"{path} needs code that comes with the model (auto_map), which is not run"
        )
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    # The class of the error depends on what is wrong.
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {first}") from error
    # Tensors are read in 16 bits, and compared with a model in fp32.
    _check_blocks(path, vars(config).pop("quantization_config", None))
    return config


def _check_blocks(path: Path, quantization: Any) -> None:
    """Check the blocks of FP8. Small matrices may have as many scales with another size of them.

    Raises:
        CheckpointError: the blocks have another size.
    """
    if not isinstance(quantization, Mapping):
        return
    sides = quantization.get("weight_block_size")
    if sides is not None and sides != [FP8_SIDE] * 2:
        raise CheckpointError(
            f"{path}: weight_block_size {sides} is not supported, only {[FP8_SIDE] * 2}; "
            "convert the weights to bf16 first"
        )


def _check_layers(path: Path, fields: Mapping[str, Any]) -> None:
    """Check the number of layers, for each of which `transformers` makes entries of a list.

    Raises:
        CheckpointError: it is not possible.
    """
    for name in ("num_hidden_layers", "n_layer"):
        layers = fields.get(name) if isinstance(fields, Mapping) else None
        if isinstance(layers, int) and not 1 <= layers <= _MAX_LAYERS:
            raise CheckpointError(f"{path}: {name} {layers} must be from 1 to {_MAX_LAYERS}")


def import_transformers() -> Any:
    """Return the module `transformers`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "this conversion needs the package transformers: pip install -e '.[hf]'"
        ) from error
    return transformers


def match_names(
    architecture: Architecture, expected: Mapping[str, tuple[int, ...]], found: HfTensors
) -> dict[str, str]:
    """Return the name in the files of each expected tensor.

    Args:
        architecture: The architecture.
        expected: Name -> shape.
        found: The tensors of the folder.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not known. The message lists
            the first 12 problems.
    """
    # GPT-2's files, for example, were written from the class without a head. Their names lack this
    # prefix.
    prefix = f"{architecture.base}."
    strip = not any(name in found.shapes for name in expected)
    names = {name: name.removeprefix(prefix) if strip else name for name in expected}
    described = [found.describe_problem(name, expected[key]) for key, name in names.items()]
    problems = [problem for problem in described if problem is not None]
    known = set(names.values())
    for name in list_other_names(architecture, found.shapes, known, found.read):
        if not _is_constant(architecture, name):
            problems.append(f"{name} is not known: its part of the model is not supported")
    refuse_problems(problems, "config.json")
    return names


def list_other_names(
    architecture: Architecture,
    stored: Collection[str],
    known: Collection[str],
    read: Callable[[str], Tensor],
) -> list[str]:
    """Return the stored tensors that are no part of a model, sorted by name.

    A table that needs no storing is left out, and so is a tied head that equals the word embedding.

    Args:
        architecture: The names of the model.
        stored: Names of all stored tensors.
        known: Names of the model's tensors.
        read: Returns a stored tensor.
    """
    head = f"{architecture.modules['head']}.weight"
    word = f"{architecture.modules['embedding.word']}.weight"
    others = []
    for name in sorted(set(stored) - set(known)):
        ignored = (*architecture.not_stored, *architecture.left_out)
        if any(re.fullmatch(pattern, name) for pattern in ignored):
            continue
        if name == head and word in stored and torch.equal(read(head), read(word)):
            continue
        others.append(name)
    return others


def _is_constant(architecture: Architecture, name: str) -> bool:
    prefix = re.escape(f"{architecture.layers}.") + r"\d+\."
    return any(re.fullmatch(prefix + re.escape(each), name) for each in architecture.constants)


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    shard_bytes: int,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write tensors to one or several safetensors files, and their index.

    One tensor is in memory at a time. The library's writer would hold two copies of a file.

    Args:
        folder: The folder.
        tensors: Names and tensors. Each is read when it is written.
        shapes: Name -> shape, in the same order.
        dtype: Dtype of the tensors.
        shard_bytes: Largest size of a file, unless one tensor is larger.
        dtypes: Name -> another dtype.

    Raises:
        OSError: a file cannot be written.
    """
    of_each = dict.fromkeys(shapes, dtype) | dict(dtypes or {})
    sizes = {name: of_each[name].itemsize * math.prod(shape) for name, shape in shapes.items()}
    shards = list(divide_by_size(sizes.items(), shard_bytes))
    iterator = iter(tensors)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        if len(shards) == 1:
            file = _SINGLE
        else:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / file, {name: shapes[name] for name in names}, of_each, iterator)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterator[tuple[str, Tensor]],
) -> None:
    """Write the next tensors to a file: length of the header, header in JSON, and the numbers."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + dtypes[name].itemsize * math.prod(shape)
        header[name] = {
            "dtype": _DTYPES[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    # The numbers begin at a multiple of 8 bytes, as the format recommends.
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for expected, shape in shapes.items():
            name, tensor = next(tensors)
            assert name == expected, "the tensors have the order of their shapes"
            assert tensor.shape == shape, f"{name} has the shape {tensor.shape}"
            assert tensor.dtype == dtypes[name], f"{name} is {tensor.dtype}"
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
