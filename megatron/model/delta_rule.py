"""The gated delta rule in chunks, and the causal convolution before it, in PyTorch's operators.

A head has a state S [d_k, d_v] that begins at 0. Token t with query q, key k, value v, decay a and
rate beta changes it, and reads it (https://arxiv.org/abs/2412.06464, equation 10):

    S <- a S + k (beta (v - (a S)^T k))^T        o = S^T q

The tokens of a chunk are computed together (section 3.3 there). With g_i the sum of log a up to
token i of the chunk, and S the state before it, what the tokens write solves a triangular system:

    (1 + L) N = beta (V - exp(g) K S)            L_ij = beta_i exp(g_i - g_j) k_i k_j  for j < i

At the first token of a document the state is 0. So L_ij and the scores are 0 for tokens of two
documents, and S is read only by the document that the last chunk ended in.

b: samples, s: tokens, n: heads of queries and keys, m: heads of values, c: channels. The state,
decays and sums have fp32, or fp64 for inputs in fp64.
"""

from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model.inputs import Documents

CHUNK = 64
"""Tokens that are computed together."""


@lru_cache(maxsize=8)
def number_tokens(documents: Documents, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of each token's document, and the tokens before it there, int64[b, s].

    Args:
        documents: Bounds of the documents of each sample. All samples have the same length.
        device: Where the model computes.
    """
    rows = []
    for bounds in documents:
        lengths = torch.tensor([stop - start for start, stop in pairwise(bounds)])
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        rows.append((number, torch.arange(bounds[-1]) - torch.tensor(bounds)[number]))
    numbers, ages = (torch.stack(each) for each in zip(*rows, strict=True))
    if device.type == "cuda":
        # The host would wait for a copy from memory that is not pinned.
        numbers, ages = numbers.pin_memory(), ages.pin_memory()
    return numbers.to(device, non_blocking=True), ages.to(device, non_blocking=True)


def convolve(
    x: Tensor, weight: Tensor, documents: Documents | None = None, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Add up the last k tokens of each channel, within documents.

    Args:
        x: [s, b, c].
        weight: [c, k]. The last column belongs to the token itself.
        documents: Bounds of the documents of each sample. None: each sample is one document.
        before: The k - 1 tokens before, [k - 1, b, c]. None: there are none.

    Returns:
        The sums, [s, b, c], and the last k - 1 tokens.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    kernel = weight.shape[1]
    if before is None:
        before = x.new_zeros(kernel - 1, *x.shape[1:])
    tokens = torch.cat((before, x)).to(wide)
    # torch's convolution cannot leave out the tokens of another document. So shifted tokens are
    # added up, each with the weight of its distance.
    taps = weight.to(wide).unbind(1)
    out = x * taps[-1]
    for back in range(1, kernel):
        first = kernel - 1 - back
        part = tokens[first : first + x.shape[0]]
        if documents is not None:
            ages = number_tokens(documents, x.device)[1].t().unsqueeze(2)
            part = part.masked_fill(ages < back, 0.0)
        out = out + part * taps[first]
    return out, tokens[x.shape[0] :]


def apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: Documents | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of all tokens, and the state after the last one.

    Args:
        query: [b, n, s, d_k].
        key: [b, n, s, d_k].
        value: [b, m, s, d_v]. n divides m, and m / n neighbouring heads share queries and keys.
        log_decay: [b, m, s], at most 0.
        beta: [b, m, s].
        documents: Bounds of the documents of each sample. None: each sample is one document.
        state: The state before the first token, [b, m, d_k, d_v]. None: zeros.

    Returns:
        [b, m, s, d_v] and [b, m, d_k, d_v].
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    samples, heads, length, width = query.shape
    size = min(CHUNK, length)
    missing = -length % size
    grouped = heads, value.shape[1] // heads

    def divide(x: Tensor) -> Tensor:
        """Return [b, n, 1 or m / n, chunks, size, ...]. Added tokens are zero."""
        shape = (0, 0) * (x.ndim - 3) + (0, missing)
        x = F.pad(x.to(wide), shape).unflatten(2, (-1, size))
        return x.unflatten(1, grouped if x.shape[1] != heads else (heads, 1))

    query, key, value, beta = (divide(x) for x in (query, key, value, beta))
    # A difference of two sums has all digits of fp32 only if the sums have more.
    total = divide(log_decay.double()).cumsum(-1)
    pair = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(wide)
    hidden = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    from_state, to_end = total.exp().to(wide), (total[..., -1:] - total).exp().to(wide)
    if documents is not None:
        number = number_tokens(documents, query.device)[0]
        # Added tokens belong to the last document.
        number = torch.cat((number, number[:, -1:].expand(-1, missing)), 1)
        number = number.view(samples, 1, 1, -1, size)
        last = number[..., -1:]
        previous = torch.cat((number[..., :1, :1], last[..., :-1, :]), 3)
        hidden = hidden | (number.unsqueeze(-1) != number.unsqueeze(-2))
        from_state = from_state * (number == previous)
        to_end = to_end * (number == last)
    decay = pair.masked_fill(hidden, float("-inf")).exp()
    transposed = key.transpose(-1, -2)
    right = torch.cat((value, from_state.unsqueeze(-1) * key), -1) * beta.unsqueeze(-1)
    # Only what is below the diagonal is read.
    solved = torch.linalg.solve_triangular(
        beta.unsqueeze(-1) * (key @ transposed) * decay, right, upper=False, unitriangular=True
    )
    # What the tokens write if the state is 0, and what the state changes about it.
    own, of_state = solved.split((value.shape[-1], width), -1)
    written = (to_end.unsqueeze(-1) * key).transpose(-1, -2)
    if state is None:
        now = value.new_zeros(samples, *grouped, width, value.shape[-1])
    else:
        now = state.to(wide).unflatten(1, grouped)
    states, news = [], []
    # The gradient of an index has the size of all chunks. That of `unbind` is written once.
    kept = from_state[..., -1, None, None]
    chunks = zip(*(each.unbind(3) for each in (own, of_state, kept, written)), strict=True)
    # Only this loop goes from chunk to chunk. The rest is computed for all chunks at once.
    for in_chunk, of_now, left, adds in chunks:
        new = in_chunk - of_now @ now
        states.append(now)
        news.append(new)
        now = left * now + adds @ new
    out = (from_state.unsqueeze(-1) * query) @ torch.stack(states, 3)
    out = out + ((query @ transposed) * decay) @ torch.stack(news, 3)
    return out.flatten(3, 4)[..., :length, :].flatten(1, 2), now.flatten(1, 2)
