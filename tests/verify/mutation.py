"""A known error of a trainer, as a change of this package in one process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 1000 "
    "--micro-batch-size 2 --lr 1e-3 --data-path data/absent"
)
"""Flags of all runs. A flag may be given again, and the last one takes effect."""
ITERATIONS = "--global-batch-size 16 --train-iters 100 --lr-warmup-iters 10"
"""The length of the runs of mutations."""
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
MEGATRON = "NVIDIA/Megatron-LM"
INVARIANTS = "invariants"
"""What finds an error, if ranks compare their replicas after each iteration of the copy."""
REPLAY = "replay"
"""What finds an error, if the copy computes the first microbatch of each step twice."""
RUN_CHECKS: dict[str, tuple[dict[str, Any], str]] = {
    INVARIANTS: ({"parallel.check_invariants_interval": 1}, "replicated state differs"),
    REPLAY: (
        {"parallel.replay_interval": 1, "parallel.replay_action": "stop"},
        "two passes with the same inputs gave different values",
    ),
}
"""Settings of a copy by what checks it while it runs, and a part of the error that ends it."""


@dataclass(frozen=True)
class Mutation:
    """An error, and the run that shows it."""

    name: str
    source: str
    flags: str
    world_size: int
    apply: Callable[[], None]
    """Changes the package in this process."""
    caught_by: str = "gradient norm"
    """The comparison that fails first, or a key of `RUN_CHECKS`."""
    first: str = ""
    """The beginning of the first activation that differs."""
    processes: int = 8
    """`--processes` of the verification."""
    documents: bool = False
    """Whether the run needs the tokenizer, because it masks at the ends of documents."""


def wrap(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))
