"""Test digests of files and blocks, the reader that checks them, and the memory that it needs."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.base.errors import DamagedError
from megatron.checkpoint.digest import BLOCK, Digester, digest_of_block, digest_of_file
from megatron.checkpoint.tensor_file import TensorReader, iterate_runs, write_tensors


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
@pytest.mark.parametrize("step", [BLOCK // 3, BLOCK, 2 * BLOCK + 5])
def test_digests_do_not_depend_on_sizes_of_updates(size: int, step: int) -> None:
    data = bytes(torch.randint(256, (size,), dtype=torch.uint8).numpy())
    digester = Digester()
    for at in range(0, size, step):
        digester.update(data[at : at + step])
    digest = digester.digest()
    assert digest.bytes == size
    assert digest.xxh128 == xxhash.xxh3_128_hexdigest(data)
    blocks = [data[at : at + BLOCK] for at in range(0, size, BLOCK)]
    assert digest.blocks == "".join(map(digest_of_block, blocks))
    assert [digest.block(number) for number in range(len(blocks))] == [
        digest_of_block(block) for block in blocks
    ]
    assert digest.block(len(blocks)) == ""


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_runs_cover_a_part_once_and_are_contiguous(data: st.DataObject) -> None:
    shape = tuple(
        data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 700, 2000]), min_size=1, max_size=3))
    )
    assume(math.prod(shape) < 10_000_000)
    part = []
    for n in shape:
        low = data.draw(st.integers(0, n - 1))
        part.append(slice(low, data.draw(st.integers(low + 1, min(n, low + 40)))))
    stored = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.int32).view(shape)
    expected = stored[tuple(part)]
    found = torch.full_like(expected, -1)
    for begin, run, inner, outer in iterate_runs(shape, tuple(part)):
        elements = int(torch.tensor(run).prod())
        assert 4 * elements <= BLOCK
        assert (found[outer] == -1).all()
        found[outer] = stored.view(-1)[begin : begin + elements].view(run)[inner]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_flipped_bit_is_found_at_any_position(position: str, tmp_path: Path) -> None:
    tensor = torch.randn(3 * BLOCK // 4 + 10)
    written = write_tensors(tmp_path / "f", {"t": tensor})
    raw = bytearray((tmp_path / "f").read_bytes())
    at = {"first": written.begins["t"], "middle": len(raw) // 2, "last": len(raw) - 1}[position]
    raw[at] ^= 1
    (tmp_path / "f").write_bytes(raw)
    box = {"file": "f", "begin": written.begins["t"], "offset": (0,), "shape": tuple(tensor.shape)}
    stored = {"shape": tuple(tensor.shape), "boxes": [box]}
    with (
        TensorReader(tmp_path, {"f": written.digest}) as reader,
        pytest.raises(DamagedError, match="f is not what was written"),
    ):
        reader.read_into(torch.empty_like(tensor), ((0,), tuple(tensor.shape)), stored, "t")
    assert digest_of_file(tmp_path / "f").xxh128 != written.digest.xxh128


def test_blocks_that_are_not_needed_are_not_read(tmp_path: Path) -> None:
    """A flipped bit in a block that a rank does not need is no error for this rank."""
    tensor = torch.randn(4 * BLOCK // 4)
    written = write_tensors(tmp_path / "f", {"t": tensor})
    raw = bytearray((tmp_path / "f").read_bytes())
    raw[-1] ^= 1
    (tmp_path / "f").write_bytes(raw)
    box = {"file": "f", "begin": written.begins["t"], "offset": (0,), "shape": tuple(tensor.shape)}
    stored = {"shape": tuple(tensor.shape), "boxes": [box]}
    target = torch.empty(1000)
    with TensorReader(tmp_path, {"f": written.digest}) as reader:
        reader.read_into(target, ((500,), (1000,)), stored, "t")
    assert torch.equal(target, tensor[500:1500])


TESTS = str(Path(__file__).resolve().parents[1])
MEMORY = """
import json, resource, sys, torch
from pathlib import Path
from megatron.checkpoint.load import open_checkpoint
from megatron.checkpoint.save import CheckpointContents
from megatron.parallel.shard import TensorShard
sys.path.insert(0, sys.argv[-1])
from saved_checkpoint import save_checkpoint

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

act = sys.argv[1]
root = Path(sys.argv[2])
shape = (16 << 10, 2, 1024)
shards = [
    TensorShard(kind, "w", shape, (0, 0, 0), torch.ones(shape), owner=True)
    for kind in ("weight", "exp_avg")
]
state = sum(4 * shard.tensor.numel() for shard in shards)
before = peak()
if act == "save":
    save_checkpoint(root, CheckpointContents(1, None, {}, ""), shards)
elif act == "load_sharded":
    # The shards are halves of the second dimension, so they are not contiguous in the files.
    halves = [
        TensorShard(shard.kind, "w", shape, (0, 1, 0), shard.tensor[:, :1], owner=True)
        for shard in shards
    ]
    open_checkpoint(root, 1).load_into(halves)
else:
    open_checkpoint(root, 1).load_into(shards)
print(json.dumps([state, before, peak()]))
"""


def test_saving_and_loading_need_little_memory(tmp_path: Path) -> None:
    """A rank needs at most 0.3 times the memory of its state in addition.

    Each case runs in a process of its own, because the peak of a process never decreases.
    """
    for act in ("save", "load", "load_sharded"):
        run = subprocess.run(
            [sys.executable, "-c", MEMORY, act, str(tmp_path), TESTS],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        )
        state, before, after = json.loads(run.stdout)
        assert state == 256 << 20
        # The state was in memory when the measurement started.
        assert before > state
        assert after - before < 0.3 * state, act


def test_values_of_two_sizes_are_aligned_and_read_in_slices(tmp_path: Path) -> None:
    """An odd number of bf16 values would move the fp32 values behind them out of alignment."""
    half = torch.randn(3, BLOCK // 4 + 7).bfloat16()
    tensors = {"half": half, "odd": torch.randn(5).bfloat16(), "full": torch.randn(BLOCK // 2 + 3)}
    written = write_tensors(tmp_path / "f", tensors)
    with TensorReader(tmp_path, {"f": written.digest}) as reader:
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            assert written.begins[name] % tensor.itemsize == 0
            box = {"file": "f", "begin": written.begins[name], "offset": (0,) * len(shape)}
            stored = {"shape": shape, "boxes": [{**box, "shape": shape}]}
            if tensor.dtype == torch.bfloat16:
                stored["dtype"] = "BF16"
            # The last column of a matrix, and the last elements of a vector.
            part = tensor[..., -9:] if tensor.dim() == 2 else tensor[-4:]
            offset = tuple(n - m for n, m in zip(shape, part.shape, strict=True))
            for dtype in (torch.bfloat16, torch.float32):
                target = torch.empty(part.shape, dtype=dtype)
                reader.read_into(target, (offset, tuple(part.shape)), stored, name)
                assert torch.equal(target, part.to(dtype))
    stored["dtype"] = "F8_E4M3"
    with pytest.raises(DamagedError, match="unknown dtype 'F8_E4M3'"):
        TensorReader(tmp_path, {}).read_into(target, (offset, tuple(part.shape)), stored, "t")
