"""GPTs of a few plain lines, as contestants of `step_time.py`.

`PlainGPT` stands for trainers such as nanoGPT. It has biases, learned positions, pre-norm blocks,
a tied output matrix, PyTorch's attention kernel, and a loss on complete logits. Its GELU is that
with tanh, like GPT-2's and that of the other contestants. nanoGPT has the GELU with erf, which is
another function and takes less time on a CPU.

`PlainModernGPT` stands for nanochat, which keeps its embedding in bf16. It has rotary positions,
norms of queries and keys, norms without weights, squared ReLU, an untied output matrix and no
biases. nanochat also caps its logits, which is left out here, so that all contestants compute the
same function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainBlock(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Create the layer's norms and projections."""
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm_2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        b, s, h = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        query, key, value = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in parts)
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A GPT-2 that returns the mean loss of a batch."""

    def __init__(
        self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int
    ) -> None:
        """Create the model. All weights are normal with a standard deviation of 0.02."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of tokens and labels, each [b, s]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class ModernBlock(nn.Module):
    """A layer of `PlainModernGPT`."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Create the layer's projections."""
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]. The tables of positions are [s, d / 2]."""
        b, s, h = x.shape
        parts = self.qkv(_norm(x)).chunk(3, dim=-1)
        query, key, value = (p.view(b, s, self.heads, -1).transpose(1, 2) for p in parts)
        query = _norm(_rotate(query, cosines, sines))
        key = _norm(_rotate(key, cosines, sines))
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(context.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.relu(self.up(_norm(x))).square())


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the pairs of [b, n, s, d] by the angles of their positions."""
    left, right = x.chunk(2, dim=-1)
    rotated = (left * cosines - right * sines, right * cosines + left * sines)
    return torch.cat(rotated, dim=-1).to(x.dtype)


class PlainModernGPT(nn.Module):
    """A GPT like nanochat's that returns the mean loss of a batch."""

    cosines: Tensor
    sines: Tensor

    def __init__(
        self, layers: int, hidden: int, heads: int, sequence: int, vocabulary: int
    ) -> None:
        """Create the model. All weights are normal with a standard deviation of 0.02."""
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(ModernBlock(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        width = hidden // heads
        rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angles = torch.outer(torch.arange(sequence).float(), rates)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of tokens and labels, each [b, s]."""
        s = tokens.shape[1]
        x = _norm(self.tokens(tokens))
        cosines = self.cosines[:s].to(x.dtype)
        sines = self.sines[:s].to(x.dtype)
        for block in self.blocks:
            x = block(x, cosines, sines)
        logits = self.head(_norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
