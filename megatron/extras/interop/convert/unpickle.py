"""Reader of the files of other trainers, which runs nothing that they contain.

A file is a pickle of torch. In a folder of torch.distributed.checkpoint, a tensor is in one or
several chunks, and memory holds the tensors that are read (`DistributedTensors`).

Invariant: a pickle can name only what is listed here, and what torch itself lists for
`weights_only` (tensors, storages, dtypes, OrderedDict). Any other name is refused before anything
of it is imported. Classes of megatron and deepspeed have stand-ins, which only keep what the file
gives them. See docs/decisions/031.
"""

import argparse
import collections
import enum
import io
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout

from megatron.base.errors import CheckpointError
from megatron.base.outside_file import INDEX_BYTES, check_regular, load_bytes, open_regular


class StandIn:
    """An object of a class that is not imported. It keeps what the file gives it, and runs nothing.

    A file sets `args` and `state` only.
    """

    def __init__(self, *args: object) -> None:
        """Keep the arguments of the constructor."""
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        self.state = state


class DroppedBytes(StandIn):
    """An `io.BytesIO`, without its bytes.

    Transformer Engine before 2.0 stored `_extra_state` as one, which has a pickle in it.
    """

    def __setstate__(self, state: object) -> None:
        """Drop the bytes."""


class FragmentAddress(StandIn):
    """Where a parameter lies in a flat partition: DeepSpeed's `fragment_address`."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return int(self._read()[0])

    @property
    def start(self) -> int:
        """Return the first element."""
        return int(self._read()[1])

    def _read(self) -> tuple[Any, Any]:
        # A frozen dataclass is pickled as its dictionary.
        if isinstance(self.state, dict):
            return self.state["numel"], self.state["start"]
        # A named tuple is pickled as its arguments.
        numel, start = self.args
        return numel, start


# The numbers are those of megatron/enums.py of BigScience's fork.
_POSITIONS = {1: "rotary", 2: "absolute", 3: "alibi"}


def name_position_embedding(number: int) -> str:
    """Return the name of a position embedding, which Megatron-DeepSpeed stores as an enumeration.

    Raises:
        UnpicklingError: there is none with this number.
    """
    if number not in _POSITIONS:
        raise pickle.UnpicklingError(f"there is no PositionEmbeddingType {number}")
    return _POSITIONS[number]


def _name_member(owner: object, name: str) -> str:
    """Return the name of an enumeration's member.

    Python 3.11 stores a member as a call of `getattr`. No attribute is read here.

    Raises:
        UnpicklingError: `owner` is not a stand-in, or `name` is no name.
    """
    known = isinstance(owner, type) and issubclass(owner, StandIn)
    if not (known or owner is name_position_embedding) or type(name) is not str:
        raise pickle.UnpicklingError("getattr is allowed for enumerations only")
    return name


def _get_metadata_member(owner: object, name: str) -> enum.Enum:
    """Return a member of an enumeration of torch's metadata.

    Python 3.11.0 to 3.11.3 stores it as a call of `getattr`. No attribute is read here.

    Raises:
        UnpicklingError: `owner` is not such an enumeration, or has no such member.
    """
    known = isinstance(owner, type) and issubclass(owner, enum.Enum)
    if not known or owner not in _METADATA.values() or type(name) is not str:
        raise pickle.UnpicklingError("getattr is allowed for enumerations only")
    members = owner.__members__  # type: ignore[attr-defined]
    if name not in members:
        raise pickle.UnpicklingError(f"there is no member {name} of this enumeration")
    member: enum.Enum = members[name]
    return member


class NumpyType(StandIn):
    """A dtype of numpy, by its code such as f8."""


def _read_numpy_scalar(kind: NumpyType, data: bytes) -> int | float | bool:
    """Return a number that was stored as a scalar of numpy.

    Raises:
        UnpicklingError: it is no number.
    """
    code = kind.args[0] if isinstance(kind, NumpyType) and kind.args else None
    if not isinstance(code, str) or not re.fullmatch(r"[fiub][1248]", code):
        raise pickle.UnpicklingError("a scalar of numpy must be a number")
    value: int | float | bool = np.frombuffer(data, dtype=np.dtype(code))[0].item()
    return value


def _ignore_array(*args: object) -> StandIn:
    """Return a stand-in for an array of numpy. Arrays hold only states of random generators."""
    return StandIn()


def _make_list(*args: object) -> list[Any]:
    """Return an empty list for a deque, whose elements follow."""
    return []


def _make_no_bytes(*args: object) -> bytes:
    """Return no bytes. An older pickle stores them as a call of `bytes`, which can take a size.

    Raises:
        UnpicklingError: the call has arguments.
    """
    if args:
        raise pickle.UnpicklingError("bytes is allowed without arguments only")
    return b""


def _join_path(*parts: object) -> str:
    """Return a path as text."""
    return "/".join(str(part) for part in parts)


# Classes of objects that checkpoints contain, in the arguments or beside them. Stand-ins run
# nothing, so one too many does no harm.
_STAND_INS = (
    "apex.amp.scaler.LossScaler",
    "deepspeed.runtime.config.DeepSpeedConfig",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.types.ActivationFuncType",
    "fp16.loss_scaler.DynamicLossScaler",
    "fp16.loss_scaler.LossScaler",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.transformer.enums.LayerType",
    "megatron.core.transformer.pipeline_parallel_layer_layout.PipelineParallelLayerLayout",
    "megatron.enums.AttnMaskType",
    "megatron.enums.LayerType",
    "megatron.enums.ModelType",
    "megatron.fp16.loss_scaler.DynamicLossScaler",
    "megatron.fp16.loss_scaler.LossScaler",
    "megatron.fp16_deprecated.loss_scaler.DynamicLossScaler",
    "megatron.fp16_deprecated.loss_scaler.LossScaler",
    "megatron.model.enums.AttnMaskType",
    "megatron.model.enums.ModelType",
    "megatron.training.config.TokenizerConfig",
    "signal.Signals",
)

ALLOWED: dict[str, Callable[..., object]] = {
    "_io.BytesIO": DroppedBytes,
    "argparse.Namespace": argparse.Namespace,
    "builtins.bytes": _make_no_bytes,
    # The real function could reach any attribute of an allowed class.
    "builtins.getattr": _name_member,
    "collections.OrderedDict": collections.OrderedDict,
    "collections.deque": _make_list,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "megatron.enums.PositionEmbeddingType": name_position_embedding,
    "numpy.core.multiarray._reconstruct": _ignore_array,
    "numpy._core.multiarray._reconstruct": _ignore_array,
    "numpy.core.multiarray.scalar": _read_numpy_scalar,
    "numpy._core.multiarray.scalar": _read_numpy_scalar,
    "numpy.dtype": NumpyType,
    "numpy.ndarray": StandIn,
    "pathlib.PosixPath": _join_path,
    **dict.fromkeys(_STAND_INS, StandIn),
}
"""Names that the files may contain, and what each becomes, besides torch's own list."""

# torch's reader of this file is a plain pickle reader, so these names are the only protection.
_METADATA = {
    f"torch.distributed.checkpoint.metadata.{name}": getattr(torch_metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    "collections.OrderedDict": collections.OrderedDict,
    "pathlib.PosixPath": _join_path,
    "torch.Size": torch.Size,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _StorageInfo,
    "torch.serialization._get_layout": _get_layout,
    **dict.fromkeys(
        (
            "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
            "torch.distributed.checkpoint.planner.BytesIOWriteData",
            "torch.distributed.checkpoint.planner.SavePlan",
            "torch.distributed.checkpoint.planner.TensorWriteData",
            "torch.distributed.checkpoint.planner.WriteItem",
            "torch.distributed.checkpoint.planner.WriteItemType",
        ),
        StandIn,
    ),
}
"""Names that the .metadata of torch.distributed.checkpoint may contain."""


def load_pickle_file(path: Path) -> Any:
    """Return what a file of `torch.save` contains. Its tensors are mapped, and not read yet.

    Files in the format before torch 1.6 are read completely.

    Raises:
        CheckpointError: the file is missing or damaged, or it names something that is not allowed.
    """
    return _load(path, path)


def load_pickle_bytes(path: Path, data: bytes) -> Any:
    """Return what a part of a file contains. See `load_pickle_file`."""
    return _load(path, io.BytesIO(data))


def _load(path: Path, source: Path | io.BytesIO) -> Any:
    allowed: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
        (function, name) for name, function in ALLOWED.items()
    ]
    try:
        check_regular(path)
        # torch can map only the newer format, which is a zip file.
        mmap = source is path and zipfile.is_zipfile(path)
        # torch's list is global, so these names are added to it during this read only.
        with torch.serialization.safe_globals(allowed), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    # The class depends on what is wrong with the file.
    except Exception as error:
        raise _make_error(path, error) from error
    _check_tensors(path, found)
    return found


def _check_tensors(path: Path, found: Any) -> None:
    """Check that all tensors are dense, and have numbers.

    Raises:
        CheckpointError: one is sparse, quantised or nested, or has no numbers.
    """
    seen: set[int] = set()
    # A file may nest its parts deeper than Python's functions.
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            if each.layout != torch.strided or each.is_meta or each.is_quantized or each.is_nested:
                raise CheckpointError(
                    f"{path} has a tensor that is sparse, quantised or nested, or that has no "
                    "numbers. Only dense tensors are read"
                )
        elif isinstance(each, Mapping | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, Mapping) else each


def load_metadata(path: Path) -> Any:
    """Return the metadata of a folder of torch.distributed.checkpoint.

    torch's reader would run what this file names.

    Raises:
        CheckpointError: the file is missing or damaged, or it names something that is not allowed.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(load_bytes(path, INDEX_BYTES))).load()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except Exception as error:
        raise _make_error(path, error) from error


def _refuse_bytearray(unpickler: object) -> None:
    """Refuse an array of bytes, whose memory is taken before its bytes are read.

    Raises:
        UnpicklingError: always.
    """
    raise pickle.UnpicklingError("metadata contain no arrays of bytes")


class _MetadataUnpickler(pickle._Unpickler):
    """Reads names of `_METADATA` and torch's dtypes only.

    The unpickler in C keeps its memo in an array. An index of 4 bytes in the file makes it as long
    as the index, which takes gigabytes. This one keeps it in a dictionary.
    """

    dispatch = pickle._Unpickler.dispatch | {pickle.BYTEARRAY8[0]: _refuse_bytearray}

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for.

        Raises:
            UnpicklingError: it is not allowed.
        """
        full = f"{module}.{name}"
        if full in _METADATA:
            return _METADATA[full]
        if full == "builtins.getattr":
            return _get_metadata_member
        # A dtype is the only kind of thing of torch that may be named. Functions are not.
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"GLOBAL {full} is not allowed")

    def persistent_load(self, pid: object) -> Any:
        """Refuse a reference to something outside of the file.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError("the file refers to something outside of it")


def _make_error(path: Path, error: Exception) -> CheckpointError:
    """Return the error of a file. The advice in torch's message, to run the file, is left out."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None:
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        return CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}")
    names = ", ".join(sorted(set(ALLOWED) | set(_METADATA)))
    return CheckpointError(
        f"{path} contains {found.group(1)}, which is not allowed, because a pickle can run code. "
        f"Nothing of it was run. Allowed are tensors and {names}"
    )


_WRONG_DESCRIPTION = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a description raises that has text in the place of a size, for example."""


class DistributedTensors:
    """The tensors of a folder, by name."""

    def __init__(self, folder: Path) -> None:
        """Read the names and sizes of the tensors.

        Raises:
            CheckpointError: `.metadata` is missing or damaged, or contains what is not allowed.
        """
        metadata = load_metadata(folder / ".metadata")
        kinds = [getattr(metadata, part, None) for part in ("state_dict_metadata", "storage_data")]
        if not all(isinstance(kind, dict) for kind in kinds):
            raise CheckpointError(f"{folder / '.metadata'} does not describe a checkpoint")
        self._folder = folder
        self._storage = metadata.storage_data
        self._entries: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and isinstance(entry.size, torch.Size)
        }
        self.entries: frozenset[str] = frozenset(metadata.state_dict_metadata)
        """Names of all entries, those that are no tensors among them."""
        self.sizes: dict[str, torch.Size] = {
            name: entry.size for name, entry in self._entries.items()
        }
        """Name -> shape."""

    def read(self, name: str, layer: int | None = None) -> Tensor:
        """Read a tensor, or one layer of a tensor that has all of them.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        try:
            return self._read(name, layer)
        except _WRONG_DESCRIPTION as error:
            raise CheckpointError(
                f"{self._folder / '.metadata'} does not describe {name} correctly "
                f"({type(error).__name__}: {error})"
            ) from error

    def _read(self, name: str, layer: int | None) -> Tensor:
        """Read a tensor. See `read`."""
        entry = self._entries[name]
        begins = [0] * len(entry.size)
        ends = list(entry.size)
        if layer is not None:
            begins[0] = layer
            ends[0] = layer + 1
        sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
        tensor = torch.empty(sizes, dtype=entry.properties.dtype)
        if tensor.is_floating_point():
            # If chunks overlap, elements are missing although the count is right. The writer of
            # checkpoints refuses these numbers.
            tensor.fill_(math.nan)
        filled = 0
        for chunk in entry.chunks:
            inside = []
            outside = []
            for begin, end, offset, size in zip(
                begins, ends, chunk.offsets, chunk.sizes, strict=True
            ):
                low = max(begin, offset)
                high = max(low, min(end, offset + size))
                inside.append(slice(low - offset, high - offset))
                outside.append(slice(low - begin, high - begin))
            part = tensor[tuple(outside)]
            if part.numel() == 0:
                continue
            part.copy_(self._read_chunk(name, chunk.offsets).reshape(chunk.sizes)[tuple(inside)])
            filled += part.numel()
        if filled != tensor.numel():
            raise CheckpointError(f"{self._folder}: parts of {name} are missing")
        if layer is None:
            return tensor
        return tensor[0]

    def _read_chunk(self, name: str, offsets: torch.Size) -> Tensor:
        """Read one chunk of a tensor from its file.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        stored = self._storage.get(MetadataIndex(name, offsets))
        # A path with a folder in it could read files elsewhere.
        if stored is None or Path(stored.relative_path).name != stored.relative_path:
            raise CheckpointError(f"{self._folder / '.metadata'} does not give the file of {name}")
        if getattr(stored, "transform_descriptors", None):
            raise CheckpointError(f"{self._folder}: {name} is compressed, which is not supported")
        path = self._folder / stored.relative_path
        try:
            with open_regular(path) as file:
                file.seek(stored.offset)
                data = file.read(stored.length)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        found = load_pickle_bytes(path, data)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{path} has no tensor for {name}")
        return found
