"""Models and checkpoints of nanoGPT and llm-baselines, for tests.

They are written after the published sources: nanoGPT (model.py, train.py) and llm-baselines
(models/base.py, models/llama.py, optim/utils.py). They are no output of these programs. They share
no code with this package, so they can be compared with it.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 4


class Norm(nn.Module):
    """LayerNorm with or without a bias."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * self.weight
        return y if self.bias is None else y + self.bias


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotate neighbouring channels of [b, s, n, d], as complex numbers."""
    _, length, _, width = x.shape
    rates = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), rates)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.view_as_real(turned).flatten(-2)


class Attention(nn.Module):
    def __init__(self, width: int, bias: bool, rotary: bool) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)
        self.rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.c_attn(x).split(width, dim=-1))
        if self.rotary:
            q, k = rotate(q), rotate(k)
        scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(q.shape[-1])
        hidden = torch.ones_like(scores).triu(1).bool()
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.c_proj(torch.einsum("bnqk,bknd->bqnd", weights, v).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.c_fc(x)
        return self.c_proj(inner * (1 + torch.erf(inner / math.sqrt(2))) / 2)


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(width, inner, bias=False)
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.c_proj(gate * torch.sigmoid(gate) * self.w2(x))


class Layer(nn.Module):
    def __init__(self, width: int, bias: bool, inner: int | None) -> None:
        super().__init__()
        llama = inner is not None
        self.ln_1 = RootMeanSquareNorm(width) if llama else Norm(width, bias)
        self.attn = Attention(width, bias, llama)
        self.ln_2 = RootMeanSquareNorm(width) if llama else Norm(width, bias)
        self.mlp = GatedMLP(width, inner) if inner is not None else PlainMLP(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Trunk(nn.Module):
    """Everything but the head. The order of the modules is that of the parameters."""

    def __init__(
        self, layers: int, width: int, length: int, rows: int, bias: bool, inner: int | None
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(rows, width)
        if inner is None:
            self.wpe = nn.Embedding(length, width)
        self.h = nn.ModuleList([Layer(width, bias, inner) for _ in range(layers)])
        self.ln_f = Norm(width, bias) if inner is None else RootMeanSquareNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        if hasattr(self, "wpe"):
            x = x + self.wpe.weight[: tokens.shape[1]]
        for layer in self.h:
            x = layer(x)
        y: Tensor = self.ln_f(x)
        return y


class Model(nn.Module):
    """The GPT of nanoGPT and llm-baselines, or with `inner` the Llama of llm-baselines."""

    def __init__(
        self, layers: int, width: int, length: int, rows: int, *, bias: bool, inner: int | None
    ) -> None:
        super().__init__()
        self.transformer = Trunk(layers, width, length, rows, bias, inner)
        self.lm_head = nn.Linear(width, rows, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            # Large weights make wrong orders visible. No two parameters are equal.
            centre = 1.0 if name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight")) else 0.0
            nn.init.normal_(parameter, centre, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.transformer(tokens))
        return logits


def build_nanogpt_optimizer(model: Model, config: dict[str, Any]) -> torch.optim.AdamW:
    """Return the optimizer of nanoGPT."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (config["beta1"], config["beta2"])
    return torch.optim.AdamW(groups, lr=config["learning_rate"], betas=betas)


def build_llm_baselines_optimizer(model: Model) -> torch.optim.AdamW:
    """Return the optimizer of llm-baselines, whose groups are sorted by name."""
    named = dict(model.named_parameters())
    decayed = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    }
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in sorted(decayed)]},
        {"params": [named[name] for name in sorted(named.keys() - decayed)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)


def compute_nanogpt_rate(config: dict[str, Any], iteration: int) -> float:
    """Return the learning rate of nanoGPT in an iteration, counted from 0, after the warm-up."""
    begin, end = config["warmup_iters"], config["lr_decay_iters"]
    assert begin <= iteration <= end
    height = 0.5 * (1 + math.cos(math.pi * (iteration - begin) / (end - begin)))
    return config["min_lr"] + height * (config["learning_rate"] - config["min_lr"])


def train(model: Model, optimizer: torch.optim.Optimizer, batch: Tensor, rate: float) -> float:
    """Take one step on a batch [b, s + 1], and return the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad()
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def fill_states(model: Model, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set both moments to functions of the weights, so that a test finds where each one went."""
    for parameter in model.parameters():
        value = parameter.detach()
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps)),
            "exp_avg": 0.5 * value + 1,
            "exp_avg_sq": value.square(),
        }


NANOGPT_CONFIG: dict[str, Any] = {
    "out_dir": "out",
    "eval_interval": 2000,
    "log_interval": 1,
    "eval_iters": 200,
    "eval_only": False,
    "always_save_checkpoint": True,
    "init_from": "scratch",
    "dataset": "openwebtext",
    "gradient_accumulation_steps": 2,
    "batch_size": 2,
    "block_size": 16,
    "n_layer": 2,
    "n_head": HEADS,
    "n_embd": 16,
    "dropout": 0.0,
    "bias": False,
    "learning_rate": 1e-2,
    "max_iters": 20,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
    "grad_clip": 1.0,
    "decay_lr": True,
    "warmup_iters": 2,
    "lr_decay_iters": 20,
    "min_lr": 1e-3,
    "backend": "nccl",
    "device": "cuda",
    "dtype": "float32",
    "compile": True,
}
"""What nanoGPT saves as `config`, with the sizes of the tests."""
_MODEL_ARGS = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")


def build_nanogpt(config: dict[str, Any], rows: int) -> Model:
    """Return a model with random weights."""
    return Model(
        config["n_layer"],
        config["n_embd"],
        config["block_size"],
        rows,
        bias=config["bias"],
        inner=None,
    )


def save_nanogpt(
    path: Path,
    model: Model,
    optimizer: torch.optim.Optimizer,
    config: dict[str, Any],
    iteration: int,
    others: Mapping[str, Any] | None = None,
) -> None:
    """Write ckpt.pt as train.py does. `others` replaces some of its entries."""
    prefix = "_orig_mod." if config["compile"] else ""
    model_args = {name: config[name] for name in _MODEL_ARGS}
    state = {
        "model": type(model.state_dict())(
            (prefix + name, tensor) for name, tensor in model.state_dict().items()
        ),
        "optimizer": optimizer.state_dict(),
        "model_args": {**model_args, "vocab_size": len(model.lm_head.weight)},
        "iter_num": iteration,
        "best_val_loss": torch.tensor(4.2),
        "config": config,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state | dict(others or {}), path)


def save_llm_baselines(
    path: Path, model: Model, optimizer: torch.optim.Optimizer, iteration: int
) -> None:
    """Write main.pt as `save_checkpoint` does, with the state of its scheduler."""
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.AdamW(model.parameters()),
        max_lr=[1e-3],
        total_steps=100,
        pct_start=0.1,
        anneal_strategy="cos",
        cycle_momentum=False,
        div_factor=1e2,
        final_div_factor=1,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "itr": iteration,
        },
        path,
    )
