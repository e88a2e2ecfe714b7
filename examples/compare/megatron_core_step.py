"""Record a step of a GPT model of Megatron-LM's core, with any tensor parallelism.

Build and load the model as your script does, on each rank, and call `record_gpt_step`. On CPUs,
call `prepare_cpu` after `initialize_model_parallel`.
"""

import contextlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from record_step import record_step
from torch import Tensor


def prepare_cpu() -> None:
    """Let Megatron's code run without a GPU. Use a model without dropout."""
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()


def record_gpt_step(path: str, model: GPTModel, tokens: Tensor) -> None:
    """Record a step on rank 0. The gradient of a sharded parameter is gathered before its norm."""
    group = parallel_state.get_tensor_model_parallel_group()
    parameters = dict(model.named_parameters())
    length = tokens.shape[1] - 1
    # True hides a position.
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)

    def compute_loss(tokens: Tensor) -> Tensor:
        positions = torch.arange(length, device=tokens.device).expand(len(tokens), -1)
        return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:].contiguous()).mean()

    def gather(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        whole = {}
        for name, gradient in gradients.items():
            parts = [gradient]
            if getattr(parameters[name], "tensor_model_parallel", False):
                parts = [torch.empty_like(gradient) for _ in range(group.size())]
                dist.all_gather(parts, gradient.contiguous(), group=group)
            # The norm does not depend on the dimension that is sharded.
            whole[name] = torch.cat([part.flatten() for part in parts])
        return whole

    place = path if dist.get_rank() == 0 else "/dev/null"
    record_step(place, model, model.decoder.layers, compute_loss, tokens, gather)
    # The norm that clipping uses has what Megatron counts on each rank.
    counted = [
        p.grad.norm() for p in model.parameters() if param_is_not_tensor_parallel_duplicate(p)
    ]
    total = torch.stack(counted).square().sum()
    dist.all_reduce(total, group=group)
    if dist.get_rank() == 0:
        step = json.loads(Path(path).read_text())
        Path(path).write_text(json.dumps({**step, "norm": total.sqrt().item()}))
