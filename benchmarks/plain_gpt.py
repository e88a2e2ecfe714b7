"""A GPT of a few plain lines, as a contestant of `step_time.py`.

It stands for trainers such as nanoGPT. It has biases, learned positions, pre-norm blocks,
a tied output matrix, PyTorch's attention kernel, and a loss on complete logits. Its GELU is that
with tanh, like GPT-2's and that of the other contestants. nanoGPT has the GELU with erf, which is
another function and takes less time on a CPU.
"""

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
