"""The optimizer's states in Megatron-LM's files of a rank: fp32 weights and Adam's moments.

- An optimizer that is not distributed stores a state for each parameter, group by group. A group
  has the matrices or the vectors, in the order of the model (megatron/core/optimizer/__init__.py,
  `_get_param_groups`).
- The distributed optimizer stores buffers in distrib_optim.pt, one for each part of the model. The
  parameters are in reverse order. Each begins at a multiple of 64 numbers after the beginning of
  its bucket, and buckets follow each other without padding (param_and_grad_buffer.py, and
  `get_parameter_state_dp_zero` of distrib_optimizer.py).

Neither names the parameters. Invariant: the states of a parameter are returned only if its fp32
weights, rounded to the dtype of the model, equal those of the model bit for bit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.base.errors import CheckpointError
from megatron.extras.interop.convert.unpickle import load_pickle_file
from megatron.parallel.shard import ADAM_KINDS, Kind

States = dict[str, dict[Kind, Tensor]]
"""Name of a parameter -> kind -> tensor with its shape."""
_ALIGNED = 64
"""Numbers to which the beginning of a parameter is aligned in its bucket."""
_WEIGHTS_ONLY = "give --weights-only to import the weights without the optimizer's states"


def read_rank_states(
    path: Path, optimizer: Any, parts: Mapping[str, Mapping[str, Tensor]]
) -> States | None:
    """Return the states of one rank's parameters. None if its files have none.

    Args:
        path: The file of the rank's weights.
        optimizer: What it has under `optimizer`.
        parts: The weights of each part of the model, in the order of the model. A rank has several
            parts with virtual stages. A name may be in one part only.

    Raises:
        CheckpointError: the states are stored in a way that is not supported, or do not fit the
            weights.
    """
    if optimizer is None:
        return None
    if not isinstance(optimizer, Mapping):
        raise CheckpointError(
            f"{path} has the states of several optimizers, which is not supported; {_WEIGHTS_ONLY}"
        )
    buffers = path.with_name("distrib_optim.pt")
    if buffers.is_file():
        return _read_buffers(buffers, parts)
    # Mixed precision wraps the optimizer. With fp32 it is not wrapped.
    inner = optimizer.get("optimizer", optimizer)
    if not isinstance(inner, Mapping) or not isinstance(inner.get("state"), Mapping):
        raise CheckpointError(
            f"{path} has no state of its parameters, and there is no {buffers.name} beside it; "
            f"{_WEIGHTS_ONLY}"
        )
    weights = {name: tensor for part in parts.values() for name, tensor in part.items()}
    return _read_groups(path, inner, optimizer.get("fp32_from_fp16_params"), weights)


def _read_groups(
    path: Path, inner: Mapping[str, Any], copies: Any, weights: Mapping[str, Tensor]
) -> States:
    """Return the states of an optimizer that is not distributed.

    Raises:
        CheckpointError: they do not fit the weights.
    """
    remaining = {
        # Megatron puts vectors into a group of their own, because they have no weight decay.
        True: iter([name for name, tensor in weights.items() if tensor.dim() > 1]),
        False: iter([name for name, tensor in weights.items() if tensor.dim() <= 1]),
    }
    found: States = {}
    for number, group in enumerate(inner.get("param_groups") or []):
        group_copies = iter(copies[number] if copies is not None else [])
        for identifier in group["params"]:
            state = inner["state"].get(identifier)
            if not isinstance(state, Mapping) or not all(kind in state for kind in ADAM_KINDS):
                raise CheckpointError(
                    f"{path} has no Adam moments of the parameter {identifier}; {_WEIGHTS_ONLY}"
                )
            name = next(remaining[state["exp_avg"].dim() > 1], None)
            if name is None:
                raise CheckpointError(f"{path} has more states than parameters; {_WEIGHTS_ONLY}")
            weight = weights[name]
            # A model in fp32 has no copies, and its weights are in the file already.
            copy = weight.float()
            if copies is not None and weight.dtype != torch.float32:
                copy = next(group_copies, torch.empty(0))
            tensors: dict[Kind, Tensor] = {"weight": copy}
            tensors |= {kind: state[kind] for kind in ADAM_KINDS}
            if any(tensor.shape != weight.shape for tensor in tensors.values()):
                raise _refuse(path, name)
            # Equal shapes prove nothing, because all layers have the same. Equal numbers do.
            if not torch.equal(copy.to(weight.dtype), weight):
                raise _refuse(path, name)
            found[name] = tensors
    missing = sorted(weights.keys() - found.keys())
    if missing:
        raise CheckpointError(f"{path} has no states of {', '.join(missing[:12])}; {_WEIGHTS_ONLY}")
    return found


def _read_buffers(path: Path, parts: Mapping[str, Mapping[str, Tensor]]) -> States:
    """Return the states of the distributed optimizer.

    Raises:
        CheckpointError: an older version wrote them, or they do not fit the weights.
    """
    content = load_pickle_file(path)
    if not isinstance(content, Mapping) or content.get("buckets_coalesced") is not True:
        raise CheckpointError(
            f"{path} was written bucket by bucket, as before Megatron core 0.7, or by several "
            f"optimizers, which is not supported; {_WEIGHTS_ONLY}"
        )
    buffers = [value for key, value in content.items() if isinstance(key, int)]
    if len(buffers) != len(parts) or any(len(each) != 1 for each in buffers):
        raise CheckpointError(
            f"{path} has {len(buffers)} buffers, and one for each of the {len(parts)} parts of the "
            f"model is supported, all of one dtype; {_WEIGHTS_ONLY}"
        )
    found: States = {}
    for buffer, weights in zip(buffers, parts.values(), strict=True):
        # The key of each buffer is the pair of its dtypes, of which there is one.
        (flat,) = buffer.values()
        found |= _divide_buffer(path, flat, weights)
    return found


def _divide_buffer(path: Path, flat: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> States:
    """Return the states of one part of the model.

    Raises:
        CheckpointError: they do not fit the weights.
    """
    found: States = {}
    start = 0
    end = 0
    # The backward pass reaches the last parameters first, and buckets are sent in that order.
    for name, weight in reversed(list(weights.items())):
        for begin, bucket in _list_positions(start, end):
            tensors = _view_parameter(flat, begin, weight)
            if tensors is not None and torch.equal(tensors["weight"].to(weight.dtype), weight):
                found[name] = tensors
                start = bucket
                end = begin + weight.numel()
                break
        else:
            raise _refuse(path, name)
    # Numbers that are left over belong to a parameter that the weights do not have.
    if end != len(flat["param"]):
        raise CheckpointError(
            f"{path} has {len(flat['param'])} numbers, and the parameters end at {end}; "
            f"{_WEIGHTS_ONLY}"
        )
    return found


def _list_positions(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield where the next parameter may begin, and the beginning of its bucket.

    Args:
        start: Beginning of the current bucket.
        end: End of the parameter before.
    """
    yield start + -(-(end - start) // _ALIGNED) * _ALIGNED, start
    # A new bucket begins. The file does not say where.
    yield end, end


def _view_parameter(
    flat: Mapping[str, Tensor], begin: int, weight: Tensor
) -> dict[Kind, Tensor] | None:
    """Return the tensors of a parameter, or None if the buffer ends before."""
    end = begin + weight.numel()
    if end > len(flat["param"]):
        return None
    keys: dict[Kind, str] = {"weight": "param", **{kind: str(kind) for kind in ADAM_KINDS}}
    return {kind: flat[key][begin:end].view(weight.shape) for kind, key in keys.items()}


def _refuse(path: Path, name: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: the optimizer's fp32 weights are not those of the model at {name}, so its order "
        f"of parameters is not known; {_WEIGHTS_ONLY}"
    )
