"""The reader of other trainers' pickles: what it accepts, and what it refuses and does not run."""

import argparse
import collections
import io
import os
import pickle
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from convert.megatron_writers import (
    PositionEmbeddingType,
    TokenizerConfig,
    fragment_address,
    their_modules,
)
from torch.distributed import checkpoint as dcp

from megatron.base.errors import CheckpointError
from megatron.extras.interop.convert.unpickle import (
    DroppedBytes,
    StandIn,
    load_metadata,
    load_pickle_file,
)


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function = function
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def mark(folder: Path) -> str:
    return f"touch {folder}/was_run"


BAD_OBJECTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "os.system": (lambda f: Call(os.system, mark(f)), "posix.system"),
    "eval": (lambda f: Call(eval, f"open('{f}/was_run', 'w')"), "eval"),
    "exec in a list": (lambda f: [1, Call(exec, f"open('{f}/was_run', 'w')")], "exec"),
    "subprocess": (lambda f: Call(subprocess.Popen, mark(f).split()), "Popen"),
    "a chain of calls": (
        lambda f: Call(map, os.system, [mark(f)]),
        "map",
    ),
    "getattr of an allowed class": (
        lambda f: Call(getattr, argparse.Namespace, "__init__"),
        "getattr is allowed for enumerations only",
    ),
    "bytes of a given size": (lambda f: Call(bytes, 10**15), "bytes is allowed without arguments"),
    "a method of a byte buffer": (lambda f: Call(io.BytesIO(b"x").getvalue), "getattr is allowed"),
    "a function of a test": (lambda f: Call(read_mark, f), "is not allowed"),
    "torch.load": (lambda f: Call(torch.load, str(f)), "torch.serialization.load"),
    "open": (lambda f: Call(open, f"{f}/was_run", "w"), "open"),
}


def read_mark(folder: Path) -> None:
    (folder / "was_run").touch()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older format"])
@pytest.mark.parametrize("bad", BAD_OBJECTS)
def test_a_pickle_with_code_is_refused_and_not_run(bad: str, zipped: bool, tmp_path: Path) -> None:
    make, message = BAD_OBJECTS[bad]
    path = tmp_path / "x.pt"
    torch.save(
        {"args": make(tmp_path), "weight": torch.ones(2)},
        path,
        _use_new_zipfile_serialization=zipped,
    )
    with pytest.raises(CheckpointError, match=message):
        load_pickle_file(path)
    assert not (tmp_path / "was_run").exists()


def test_the_message_names_the_class_and_those_that_are_allowed(tmp_path: Path) -> None:
    torch.save(Call(subprocess.getoutput, "true"), tmp_path / "x.pt")
    with pytest.raises(CheckpointError) as error:
        load_pickle_file(tmp_path / "x.pt")
    # Protocol 2 has the names of Python 2.
    assert "commands.getoutput" in str(error.value)
    assert "argparse.Namespace" in str(error.value)
    # torch's own message has advice to run the file.
    assert "weights_only" not in str(error.value)


def test_a_persistent_id_that_is_no_storage_is_refused(tmp_path: Path) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("module", "os") if obj == "there" else None

    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        with file.open("x/data.pkl", "w") as data:
            Pickler(data, protocol=2).dump(["there"])
        file.writestr("x/version", "3")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pickle_file(tmp_path / "x.pt")


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04", pickle.dumps({"a": 1})[:-3]])
def test_a_damaged_file_is_an_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pickle_file(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pickle_file(tmp_path / "missing.pt")


def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), str(tmp_path / "x.pt"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pickle_file(tmp_path / "x.pt")


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older format"])
def test_what_megatron_saves_is_read(zipped: bool, tmp_path: Path) -> None:
    with their_modules():
        args = argparse.Namespace(
            position_embedding_type=PositionEmbeddingType.alibi,
            skip=collections.deque([[1, 2]]),
            params_dtype=torch.float16,
            epsilon=np.float64(0.5),
        )
        # The name is Megatron-LM's. A module of this package that is renamed does not change it.
        tokenizer = TokenizerConfig()
        content = {
            "args": args,
            "np_rng_state": np.random.get_state(),
            "place": fragment_address(5, 3),
            "tokenizer": tokenizer,
            "weight": torch.arange(3.0),
        }
        torch.save(content, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = load_pickle_file(tmp_path / "x.pt")
    assert vars(found["args"]) == {
        "position_embedding_type": "alibi",
        "skip": [[1, 2]],
        "params_dtype": torch.float16,
        "epsilon": 0.5,
    }
    assert isinstance(found["np_rng_state"][1], StandIn)
    assert isinstance(found["tokenizer"], StandIn)
    assert (found["place"].numel, found["place"].start) == (5, 3)
    assert isinstance(found["tokenizer"], StandIn)
    assert torch.equal(found["weight"], torch.arange(3.0))


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "older format"])
def test_the_pickle_in_a_byte_buffer_is_dropped_and_not_run(zipped: bool, tmp_path: Path) -> None:
    """Transformer Engine before 2.0 stored the state of a layer as such a buffer."""
    content = io.BytesIO(pickle.dumps(Call(os.system, mark(tmp_path))) + bytes(range(256)))
    state = {"_extra_state": content, "empty": io.BytesIO(), "weight": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    found = load_pickle_file(tmp_path / "x.pt")
    assert torch.equal(found.pop("weight"), torch.ones(2))
    for each in found.values():
        assert type(each) is DroppedBytes
        # Neither the bytes nor a method of a buffer are left.
        assert not vars(each)
        assert not hasattr(each, "getvalue")
    # The constructor can be called too. It keeps no more than any other stand-in.
    torch.save(Call(io.BytesIO, b"abc"), tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert type(load_pickle_file(tmp_path / "x.pt")) is DroppedBytes
    assert not (tmp_path / "was_run").exists()


def test_metadata_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    dcp.save(
        {"a": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path / "x"), no_dist=True
    )
    assert "a" in load_metadata(tmp_path / "x" / ".metadata").state_dict_metadata
    for bad in (Call(os.system, mark(tmp_path)), Call(getattr, argparse.Namespace, "__init__")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(bad))
        with pytest.raises(CheckpointError, match="is not allowed"):
            load_metadata(tmp_path / ".metadata")
    assert not (tmp_path / "was_run").exists()


def test_members_of_enumerations_in_metadata_are_read(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 stores a member as a call of `getattr`."""
    kinds = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Call(getattr, kinds, "TORCH_PRESERVE_FORMAT")))
    assert load_metadata(path) is kinds.TORCH_PRESERVE_FORMAT
    storage = torch.distributed.checkpoint.metadata.TensorStorageMetadata
    for owner, name in ((kinds, "__class__"), (kinds, "__doc__"), (storage, "__init__")):
        path.write_bytes(pickle.dumps(Call(getattr, owner, name)))
        with pytest.raises(CheckpointError, match="enumeration"):
            load_metadata(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # LONG_BINPUT with the index 0x1000000, and BYTEARRAY8 with 256 MB.
        (b"Nr\x00\x00\x00\x01.", None),
        (b"\x80\x05\x96\x00\x00\x00\x10\x00\x00\x00\x00.", "no arrays of bytes"),
    ],
)
def test_small_metadata_take_little_memory(
    data: bytes, message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        if message is None:
            assert load_metadata(path) is None
        else:
            with pytest.raises(CheckpointError, match=message):
                load_metadata(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
