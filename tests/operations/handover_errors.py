"""Changes of a run in code, behind a record of the start that does not show them."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from process_pool import pretrain

from megatron.data import batches
from megatron.parallel.shard import TensorShard
from megatron.run.state import TrainState


def change(plan: Any, group: str, **values: Any) -> Any:
    """Return a plan with other values in a group of the configuration."""
    config = plan.config
    changed = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(plan, config=dataclasses.replace(config, **{group: changed}))


def with_plan(target: str, group: str, **values: Any) -> Callable[[], Any]:
    """Return the patch of a function whose first argument is the plan."""

    def patch() -> Any:
        module, _, name = target.rpartition(".")
        original = getattr(__import__(module, fromlist=[name]), name)

        def changed(plan: Any, *arguments: Any, **more: Any) -> Any:
            return original(change(plan, group, **values), *arguments, **more)

        return mock.patch(target, changed)

    return patch


def swap_rows() -> Any:
    """Import the first two rows of each matrix in the wrong order."""

    def wrong(_: Any, shards: list[TensorShard], config: object) -> None:
        for shard in shards:
            if shard.kind == "weight" and re.search("mlp", shard.name) and shard.tensor.dim() > 1:
                shard.tensor.copy_(torch.roll(shard.tensor, 1, dims=0))

    return mock.patch("megatron.commands.parts.InstalledParts.change_loaded", wrong)


def read_other_samples() -> Any:
    """Read the batch in another order, from the second sample on."""
    original = batches.compute_sample_positions

    def wrong(consumed: int, *arguments: Any) -> Any:
        return original(consumed + 1, *arguments)

    return mock.patch("megatron.data.position_source.compute_sample_positions", wrong)


def read_other_ids() -> Any:
    """Exchange two ids, as another tokenizer would."""
    from megatron.data.indexed_source import IndexedSource

    original = IndexedSource.fill

    def wrong(self: Any, positions: Any, samples: Any) -> None:
        original(self, positions, samples)
        samples[samples == 11] = 12

    return mock.patch.object(IndexedSource, "fill", wrong)


def normalise_otherwise() -> Any:
    """Add another epsilon to each variance."""
    original = torch.layer_norm

    def wrong(x: Any, shape: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        return original(x, shape, weight, bias, 10 * epsilon)

    return mock.patch("torch.layer_norm", wrong)


def decay_faster() -> Any:
    """Give a rate that decays to another value."""
    original = TrainState.compute_learning_rate
    return mock.patch.object(
        TrainState, "compute_learning_rate", lambda self, schedule: 0.99 * original(self, schedule)
    )


CORPUS = str(
    Path(__file__).parents[1] / "fixtures/openwebtext-100/meg-gpt2-openwebtext_text_document"
)
ENGINE = "megatron.run.start.build.build_engine"
DATA = "megatron.run.start.build.open_data"
ERRORS: dict[str, Callable[[], Any]] = {
    "seed of dropout": with_plan(ENGINE, "batch", seed=77),
    "data order": read_other_samples,
    "blend weight": with_plan(DATA, "data", data_path=("0.2", CORPUS, "0.8", CORPUS)),
    "beta2": with_plan(ENGINE, "optimizer", adam_beta2=0.95),
    "epsilon": with_plan(ENGINE, "optimizer", adam_eps=1e-5),
    "weight decay": with_plan(ENGINE, "optimizer", weight_decay=0.1),
    "learning-rate schedule": decay_faster,
    "wrong import": swap_rows,
    "another tokenizer": read_other_ids,
    "epsilon of norms": normalise_otherwise,
    "loss mask off": with_plan(DATA, "data", eod_mask_loss=False),
    "bf16 for fp32": with_plan(ENGINE, "precision", bf16=True),
}


def pretrain_with_error(argv: list[str], name: str) -> None:
    """Run a command line on this rank, with an error in the code."""
    with ERRORS[name]():
        pretrain(argv)
