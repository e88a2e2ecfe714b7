"""DeepSpeed's flat partitions: their elements as shards of global tensors, and AdamW over them.

DeepSpeed flattens the parameters of a group and divides the result evenly over the data-parallel
ranks. The boundaries ignore rows. A rank holds a contiguous run of a parameter's elements, which is
in general no rectangular slice. `split_run` divides such a run into rectangular slices.

Checkpoints need fp32 tensors that can be read and written in place. torch's moments are such
tensors. The moments of bitsandbytes are 8-bit codes (https://arxiv.org/abs/2110.02861) in blocks
that share a scale. They are decoded into host memory on request, and encoded again after a load.

The invariant: codes that are decoded and encoded again do not change, if the block boundaries are
the same. A resume at the same layout is therefore bit-identical.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import ConfigError
from megatron.config.optimizer import OptimizerConfig
from megatron.parallel.parameter_spec import ParameterSpec
from megatron.parallel.shard import Kind, TensorShard

_BLOCK = 256
"""Number of elements that share a scale in bitsandbytes' optimizers."""
_STATE: dict[Kind, str] = {"exp_avg": "1", "exp_avg_sq": "2"}
"""The suffix of bitsandbytes' state names (`state1`, `qmap1`, `absmax1`) for each moment."""


@dataclass(frozen=True)
class Fragment:
    """The elements of a parameter that this rank's flat partition holds.

    They are a contiguous run of the elements of the rank's tensor-parallel shard.
    """

    name: str
    spec: ParameterSpec
    offset: tuple[int, ...]
    """Offset of the tensor-parallel shard in the global parameter. It is 0 for one in pieces."""
    shape: tuple[int, ...]
    """Shape of the tensor-parallel shard, vocabulary padding included."""
    start: int
    """Index of the run's first element in the flattened tensor-parallel shard."""
    size: int
    """Number of elements in the run."""
    flat: int
    """Index of the flat partition of this rank that holds the run."""
    at: int
    """Index of the run's first element in that flat partition."""

    def shards(self, flats: Mapping[Kind, Tensor], *, owner: bool) -> Iterator[TensorShard]:
        """Return views of the flat partition, one for each rectangular slice of the run and kind.

        Args:
            flats: The flat partition's tensor for each kind.
            owner: Whether this rank stores the shards in a checkpoint.
        """
        for inner, shape, first in split_run(self.start, self.start + self.size, self.shape):
            offset = tuple(a + b for a, b in zip(self.offset, inner, strict=True))
            # Rows of the vocabulary padding are no part of the global tensor, so they must not get
            # into a checkpoint.
            for piece in self.spec.locate_rows(offset[0], shape[0]):
                rows = slice(piece.local, piece.local + piece.rows)
                for kind, flat in flats.items():
                    run = flat.narrow(0, self.at + first - self.start, math.prod(shape)).view(shape)
                    yield TensorShard(
                        kind,
                        self.name,
                        self.spec.shape,
                        (piece.start, *offset[1:]),
                        run[rows],
                        owner,
                    )


def split_run(
    start: int, stop: int, shape: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Divide the elements start .. stop - 1 of a contiguous tensor into rectangular slices.

    The slices come in the order of the elements.

    Yields:
        The offset of a slice, its shape, and the index of its first element.
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,), start
        return
    # A run consists of the end of a row, some complete rows, and the beginning of a row. Complete
    # rows form one slice. An incomplete row is divided by the same rule in one dimension less.
    row = math.prod(shape[1:])
    while start < stop:
        index, inside = divmod(start, row)
        if inside == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield (index, *(0 for _ in shape[1:])), (rows, *shape[1:]), start
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offset, size, first in split_run(inside, end - index * row, shape[1:]):
            yield (index, *offset), (1, *size), index * row + first
        start = end


def build_adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the AdamW that the configuration selects.

    Args:
        groups: The parameter groups, each with its weight decay.
        config: The optimizer's configuration.

    Raises:
        ConfigError: The configuration selects bitsandbytes, which is not installed.
    """
    # The learning rate is 0 here, because the engine sets it before each step. The groups are
    # copied, because torch adds its defaults to the dictionaries.
    groups = [dict(group) for group in groups]
    betas = (config.adam_beta1, config.adam_beta2)
    if not config.use_bnb_optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"--use-bnb-optimizer: {error}; install it with pip install bitsandbytes, "
            "or remove the flag"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas, eps=config.adam_eps)
    return optimizer


class TorchMoments:
    """The moments of torch's AdamW, which are fp32 tensors already."""

    live = True
    """Whether `open` returns the tensors that the optimizer itself updates."""

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[Tensor]) -> None:
        """Create the moments of `flats` in the optimizer's state.

        torch would create them in its first step. A checkpoint is loaded before that.
        """
        self._states = []
        for flat in flats:
            moments = {kind: torch.zeros_like(flat) for kind in _STATE}
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
            self._states.append(optimizer.state[flat])

    def open(self, index: int, kind: Kind) -> Tensor:
        """Return a moment of flat tensor `index` in fp32, with one dimension.

        It is the same tensor on each call until `take_over` or `drop`.
        """
        tensor: Tensor = self._states[index][kind]
        return tensor

    def take_over(self, step: int) -> None:
        """Give the optimizer what was written into open tensors, and its step count.

        Adam's bias correction depends on the count.
        """
        for state in self._states:
            state["step"].fill_(float(step))

    def drop(self) -> None:
        """Free the tensors that are open. These belong to the optimizer."""


class EightBitMoments:
    """The moments of bitsandbytes' AdamW, decoded on request. Its methods are those of torch's."""

    live = False

    def __init__(
        self, optimizer: Any, flats: Sequence[Tensor], group_of: Sequence[int], exact: set[int]
    ) -> None:
        """Create the moments of `flats` in the optimizer's state.

        Args:
            optimizer: bitsandbytes' AdamW.
            flats: The flat tensors.
            group_of: The parameter group of each flat tensor.
            exact: The parameter groups whose moments stay in fp32.
        """
        self._states: list[dict[str, Any]] = []
        self._opened: dict[tuple[int, Kind], Tensor] = {}
        for flat, index in zip(flats, group_of, strict=True):
            group = optimizer.param_groups[index]
            # `init_state` looks the tensor up in its group. DeepSpeed's ZeRO 3 fills the groups
            # during a step only, so the tensor is put there for the call.
            now, group["params"] = group["params"], [flat]
            # bitsandbytes reads this value only when it creates the state. So it can differ between
            # groups.
            optimizer.args.optim_bits = 32 if index in exact else 8
            optimizer.init_state(group, flat, index, 0)
            group["params"] = now
            self._states.append(optimizer.state[flat])

    def open(self, index: int, kind: Kind) -> Tensor:
        """Return a moment in fp32, decoded if it has 8 bits. See `TorchMoments.open`."""
        if (index, kind) not in self._opened:
            self._opened[index, kind] = self._read(self._states[index], _STATE[kind])
        return self._opened[index, kind]

    def take_over(self, step: int) -> None:
        """Encode the open tensors into the optimizer's state, and set the step count."""
        for (index, kind), opened in self._opened.items():
            state = self._states[index]
            name = _STATE[kind]
            # A moment in fp32 is the optimizer's own tensor, which was written in place.
            if state[f"state{name}"].dtype == torch.uint8:
                codes, scales = encode(opened, state[f"qmap{name}"].cpu())
                state[f"state{name}"].copy_(codes)
                state[f"absmax{name}"].copy_(scales)
        for state in self._states:
            state["step"] = step
        self.drop()

    def drop(self) -> None:
        """Free the decoded tensors."""
        self._opened.clear()

    @staticmethod
    def _read(state: dict[str, Any], name: str) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        codes: Tensor = state[f"state{name}"]
        # bitsandbytes keeps the moments of small tensors and of exact groups in fp32.
        if codes.dtype != torch.uint8:
            return codes
        # In host memory, because decoded moments are four times as large as their codes.
        absmax = state[f"absmax{name}"]
        code = state[f"qmap{name}"]
        return dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=_BLOCK).cpu()


FlatMoments = TorchMoments | EightBitMoments


def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8-bit codes of numbers and the scale of each block.

    The scale is in general the block's largest magnitude. If the numbers were decoded from codes,
    it is the scale of these codes, which may be larger. `table` ends at 1 but begins above -1, so a
    block whose largest magnitude was negative had a larger scale.

    Args:
        values: The numbers, [n] fp32.
        table: The value of each code, [256], sorted.

    Returns:
        The codes, [n] uint8, and the scales, [ceil(n / 256)].
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    largest = blocks.abs().amax(dim=1)
    # The code of a number is the number of midpoints below it.
    between = (table[1:] + table[:-1]) / 2

    def find_nearest(scales: Tensor) -> Tensor:
        # A block of zeros has the scale 0. Dividing by it would give nan.
        return torch.bucketize(blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1), between)

    scales = largest.clone()
    codes = find_nearest(scales)
    inexact = (table[codes] * scales.unsqueeze(1) != blocks).any(dim=1)
    # The other scale that a block may have had. The quotient may be one or two units in the last
    # place off, so its neighbours in both directions are tried too. A scale is taken if it
    # reproduces every number of the block exactly.
    candidate = largest / -table[0]
    infinity = torch.tensor(torch.inf)
    for direction in (infinity, -infinity):
        shifted = candidate.clone()
        # The table of `exp_avg_sq` has no negative numbers, so there is no other scale.
        for _ in range(3 if table[0] < 0 and bool(inexact.any()) else 0):
            attempt = find_nearest(shifted)
            fits = inexact & (table[attempt] * shifted.unsqueeze(1) == blocks).all(dim=1)
            codes[fits], scales[fits] = attempt[fits], shifted[fits]
            inexact &= ~fits
            shifted = torch.nextafter(shifted, direction)
    return codes.to(torch.uint8).view(-1)[: len(values)], scales
