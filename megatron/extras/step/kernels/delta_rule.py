"""The gated delta rule by the Triton kernels of fla-core, in place of `apply_delta_rule`.

They are https://github.com/fla-org/flash-linear-attention. They read 16 bits, and keep decays, sums
and states in fp32. No GPU has run them here: a function with the same arguments took their place.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron.model.inputs import Documents
from megatron.model.packed_attention import pack_documents


class DeltaRuleKernel:
    """A function with the arguments and the results of `apply_delta_rule`."""

    def __init__(self, *, in_bf16: bool) -> None:
        """Import the kernels, for queries, keys and values in bf16 or in fp16."""
        kernels: Any = importlib.import_module("fla.ops.gated_delta_rule")
        self._compute = kernels.chunk_gated_delta_rule
        self._dtype = {True: torch.bfloat16, False: torch.float16}[in_bf16]

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Documents | None = None,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `apply_delta_rule`."""
        samples, _, length, _ = query.shape
        query, key, value = (x.transpose(1, 2).to(self._dtype) for x in (query, key, value))
        inputs = [query, key, value, log_decay.transpose(1, 2), beta.transpose(1, 2)]
        bounds = None
        if documents is not None:
            # The kernels take documents as one sample, [1, b s, ...].
            bounds = pack_documents(documents, query.device).bounds.long()
            inputs = [x.flatten(0, 1).unsqueeze(0) for x in inputs]
        # The queries have their scale already.
        out, last = self._compute(
            *inputs, scale=1.0, initial_state=state, output_final_state=True, cu_seqlens=bounds
        )
        if documents is not None:
            out = out.view(samples, length, *out.shape[2:])
            # The state of each sample is that of its last document.
            ends = torch.tensor([len(each) - 1 for each in documents]).cumsum(0) - 1
            last = last[ends.to(last.device)]
        return out.transpose(1, 2).to(log_decay.dtype), last
