"""Tests of --reset-attention-mask and --reset-position-ids.

A sample of several documents is computed as if each document were a sample of its own.
"""

from typing import Any

import pytest
import torch
from model.builders import VOCAB, build, some_tokens, tiny_config

from megatron.data.batches import Microbatch
from megatron.data.documents import DocumentRules
from megatron.model.gpt import GPT
from megatron.model.inputs import Inputs

EOD = 5
SHAPES: dict[str, dict[str, Any]] = {
    "learned": {},
    "rotary": {"position_embedding_type": "rotary", "num_query_groups": 2},
    "alibi": {"position_embedding_type": "alibi"},
    "windowed": {"position_embedding_type": "rotary", "sliding_window": 6},
}


def packed() -> Microbatch:
    """Return two samples, with documents of 7, 10 and 7 tokens, and of 24 tokens."""
    tokens = some_tokens(batch=2, seed=1)
    labels = some_tokens(batch=2, seed=2)
    tokens[tokens == EOD] = EOD + 1
    tokens[0, [6, 16]] = EOD
    return Microbatch(tokens, labels)


def outputs(model: GPT, microbatch: Microbatch) -> torch.Tensor:
    """Return the input of the output projection, [b, s, h]."""
    inputs = Inputs(
        microbatch.tokens,
        microbatch.labels,
        microbatch.loss_mask,
        microbatch.position_ids,
        microbatch.documents,
    )
    assert model.head is not None
    return model.head.norm(model.run_blocks(None, inputs)).transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_computed_as_if_alone(shape: str) -> None:
    model = build(tiny_config(**SHAPES[shape])).eval()
    microbatch = packed()
    rules = DocumentRules(
        EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=False
    )
    together = outputs(model, rules.apply(microbatch))
    for sample, start, stop in ((0, 0, 7), (0, 7, 17), (0, 17, 24), (1, 0, 24)):
        part = slice(start, stop)
        alone = outputs(
            model,
            Microbatch(microbatch.tokens[sample : sample + 1, part], microbatch.labels[:1, part]),
        )
        torch.testing.assert_close(together[sample, part], alone[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[0], outputs(model, microbatch)[0], atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_flow_within_documents_only(shape: str) -> None:
    model = build(tiny_config(**SHAPES[shape]))
    rules = DocumentRules(
        EOD, reset_position_ids=False, reset_attention_mask=True, eod_mask_loss=False
    )
    microbatch = rules.apply(packed())
    stream: list[torch.Tensor] = []
    assert model.embedding is not None
    model.embedding.register_forward_hook(lambda module, inputs, output: stream.append(output))
    out = outputs(model, microbatch)
    # The sum of normalised values is a constant, so they get different weights.
    direction = torch.linspace(0, 1, out.shape[-1])
    (gradient,) = torch.autograd.grad(out[0, 10] @ direction, stream)  # [s, b, h]
    seen = gradient.abs().sum(dim=2)
    assert (seen[7:11, 0] > 0).all()
    assert (seen[:7, 0] == 0).all()
    assert (seen[11:, 0] == 0).all()
    assert (seen[:, 1] == 0).all()


def test_predictions_at_an_end_of_document_do_not_count() -> None:
    model = build(tiny_config())
    rules = DocumentRules(
        EOD, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True
    )
    microbatch = rules.apply(packed())
    inputs = Inputs(microbatch.tokens, microbatch.labels, microbatch.loss_mask)
    other = microbatch.labels.clone()
    other[0, [6, 16]] = (other[0, [6, 16]] + 1) % VOCAB
    changed = Inputs(microbatch.tokens, other, microbatch.loss_mask)
    assert model(None, inputs).item() == model(None, changed).item()
    assert (
        model(None, inputs).item()
        != model(None, Inputs(microbatch.tokens, microbatch.labels)).item()
    )
