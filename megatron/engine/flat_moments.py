"""AdamW over flat tensors, as DeepSpeed calls it, and its moments as checkpoints have them: fp32, to be read and written in place.

Torch's moments are that already. Those of bitsandbytes are 8-bit codes (https://arxiv.org/abs/2110.02861) in blocks that share a
scale: they are opened in host memory when they are asked for, and taken over or dropped afterwards. Codes that are opened and
taken over are what they were, as long as blocks are cut alike: a resume at the same layout is bit-identical.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.errors import ConfigError
from megatron.parallel.shard import Kind

_BLOCK = 256
"""Numbers of bitsandbytes' optimizers that share a scale."""
_STATE: dict[Kind, str] = {"exp_avg": "1", "exp_avg_sq": "2"}


class FlatMoments(Protocol):
    live: bool
    """Whether `open` gives the very tensors that the optimizer updates."""

    def open(self, index: int, kind: Kind) -> Tensor:
        """A flat tensor's moments, fp32, [its elements]; the same tensor until `take_over` or `drop`."""
        ...

    def take_over(self, step: int) -> None:
        """What was written into open tensors is the optimizer's now, after so many steps."""
        ...

    def drop(self) -> None:
        """What is open is no longer needed."""
        ...


def build_adamw(groups: Sequence[dict[str, Any]], config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer that was asked for.

    Raises:
        ConfigError: bitsandbytes was, and is not installed.
    """
    groups, betas = [dict(group) for group in groups], (config.adam_beta1, config.adam_beta2)
    if not config.use_bnb_optimizer:
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.adam_eps, fused=True)
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"--use-bnb-optimizer: {error}; pip install bitsandbytes, or leave the flag out"
        ) from error
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=0.0, betas=betas, eps=config.adam_eps)
    return optimizer


class TorchMoments:
    live = True

    def __init__(self, optimizer: torch.optim.Optimizer, flats: Sequence[Tensor]) -> None:
        """They exist from the start, so that they can be loaded into."""
        self._states = []
        for flat in flats:
            moments = {kind: torch.zeros_like(flat) for kind in _STATE}
            optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
            self._states.append(optimizer.state[flat])

    def open(self, index: int, kind: Kind) -> Tensor:
        tensor: Tensor = self._states[index][kind]
        return tensor

    def take_over(self, step: int) -> None:
        for state in self._states:
            state["step"].fill_(float(step))

    def drop(self) -> None:
        """They are the optimizer's."""


class EightBitMoments:
    live = False

    def __init__(
        self, optimizer: Any, flats: Sequence[Tensor], group_of: Sequence[int], exact: set[int]
    ) -> None:
        """`group_of`: each tensor's parameter group; of the groups `exact` the moments stay in fp32."""
        self._states: list[dict[str, Any]] = []
        self._opened: dict[tuple[int, Kind], Tensor] = {}
        for flat, index in zip(flats, group_of, strict=True):
            group = optimizer.param_groups[index]
            now, group["params"] = (
                group["params"],
                [flat],
            )  # DeepSpeed's ZeRO 3 fills the groups during a step only
            optimizer.args.optim_bits = 32 if index in exact else 8  # only asked for here
            optimizer.init_state(group, flat, index, 0)
            group["params"] = now
            self._states.append(optimizer.state[flat])

    def open(self, index: int, kind: Kind) -> Tensor:
        if (index, kind) not in self._opened:
            self._opened[index, kind] = self._read(self._states[index], _STATE[kind])
        return self._opened[index, kind]

    def take_over(self, step: int) -> None:
        for (index, kind), opened in self._opened.items():
            state, name = self._states[index], _STATE[kind]
            if state[f"state{name}"].dtype == torch.uint8:
                codes, scales = encode(opened, state[f"qmap{name}"].cpu())
                state[f"state{name}"].copy_(codes)
                state[f"absmax{name}"].copy_(scales)
        for state in self._states:
            state["step"] = step
        self.drop()

    def drop(self) -> None:
        self._opened.clear()

    @staticmethod
    def _read(state: dict[str, Any], name: str) -> Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        codes: Tensor = state[f"state{name}"]
        if codes.dtype != torch.uint8:
            return codes  # small tensors and exact ones
        absmax, code = state[f"absmax{name}"], state[f"qmap{name}"]
        return dequantize_blockwise(codes, absmax=absmax, code=code, blocksize=_BLOCK).cpu()


def encode(values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes of numbers, [n] uint8, and the scale of each block, [ceil(n / 256)].

    The scale is the block's largest magnitude. Where the numbers come from codes, it is the scale that they had: a block whose
    largest number was negative had a larger one, since `table`, [256] and sorted, ends at 1 but begins above -1.
    """
    blocks = torch.nn.functional.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
    largest = blocks.abs().amax(dim=1)
    between = (table[1:] + table[:-1]) / 2

    def find_nearest(scales: Tensor) -> Tensor:
        return torch.bucketize(blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1), between)

    scales = largest.clone()
    codes = find_nearest(scales)
    inexact = (table[codes] * scales.unsqueeze(1) != blocks).any(dim=1)
    candidate = largest / -table[0]
    infinity = torch.tensor(torch.inf)
    for direction in (infinity, -infinity):  # the quotient is a rounding or two off
        shifted = candidate.clone()
        for _ in range(3 if table[0] < 0 and bool(inexact.any()) else 0):
            attempt = find_nearest(shifted)
            fits = inexact & (table[attempt] * shifted.unsqueeze(1) == blocks).all(dim=1)
            codes[fits], scales[fits] = attempt[fits], shifted[fits]
            inexact &= ~fits
            shifted = torch.nextafter(shifted, direction)
    return codes.to(torch.uint8).view(-1)[: len(values)], scales
