"""Record one training step of any model for `tools/verify.py --compare`, before its optimizer.

    record_step("step.json", model, model.model.layers, compute_loss, tokens)     # transformers
    record_step("step.json", model, model.transformer.h, compute_loss, tokens)    # nanoGPT
    rename = Llama3StateDictAdapter(model_args, None).to_hf                       # torchtitan
    record_step("step.json", model, model.layers.values(), compute_loss, tokens, rename)

The other files of this folder are for Megatron-LM's core and litgpt.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def record_step(
    path: str,
    model: nn.Module,
    layers: Iterable[nn.Module],
    compute_loss: Callable[[Tensor], Tensor],
    tokens: Tensor,
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> None:
    """Write tokens, loss, norms of gradients, and sizes of the inputs of the layers.

    Args:
        path: The JSON file to write.
        model: The model. Its gradients are replaced.
        layers: Its layers, in order. The first argument of each is the residual stream.
        compute_loss: Returns the mean loss of the samples.
        tokens: The samples, int64[b, s + 1].
        rename: Returns the gradients under the names of transformers.
    """
    inputs: list[float] = []

    def measure(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        stream = given[0] if given else named["hidden_states"]
        inputs.append(stream.detach().float().square().mean().sqrt().item())

    hooks = [layer.register_forward_pre_hook(measure, with_kwargs=True) for layer in layers]
    model.zero_grad()
    loss = compute_loss(tokens)
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norms = {name: grad.float().norm().item() for name, grad in rename(gradients).items()}
    step = {"tokens": tokens.tolist(), "loss": loss.item(), "gradients": norms, "inputs": inputs}
    Path(path).write_text(json.dumps(step))


def make_tokens(vocabulary: int, samples: int = 2, length: int = 16) -> Tensor:
    """Return random samples, int64[samples, length + 1]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, vocabulary, (samples, length + 1), generator=generator)
