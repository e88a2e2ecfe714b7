"""The tasks of --eval-tasks: prepared before training, and scored on all ranks.

Rank 0 alone has lm-evaluation-harness. It sends the token ids of all requests to the other ranks.
Errors in the tasks are therefore found before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.base.errors import ConfigError, MegatronError, TrainingError
from megatron.config.tree import Config
from megatron.engine.base import Engine
from megatron.extras.inference.scoring.likelihood import EngineScorer, PackedRequests
from megatron.extras.inference.scoring.tasks import find_tasks
from megatron.parallel.mesh import Mesh
from megatron.parallel.ranks import Ranks
from megatron.plan.run_plan import Plan
from megatron.run.parts import Tasks
from megatron.tokenizer.build import build_tokenizer

if TYPE_CHECKING:
    from megatron.extras.inference.scoring.harness import FixedTasks


@dataclass
class EvalTasks(Tasks):
    """The tasks of a run."""

    requests: PackedRequests
    """What is scored, the same on every rank."""
    tasks: FixedTasks | None
    """Only on rank 0."""
    ranks: Ranks
    evaluated_at: int | None = None
    """The last iteration after which the tasks were evaluated."""

    def evaluate(
        self, engine: Engine, plan: Plan, mesh: Mesh, log: Callable[[str], None]
    ) -> dict[str, dict[str, float]]:
        """See `Tasks`."""
        likelihoods = EngineScorer(engine, plan, mesh).score(self.requests)
        return self.compute_scores(likelihoods, log)

    def compute_scores(
        self, likelihoods: Tensor, log: Callable[[str], None]
    ) -> dict[str, dict[str, float]]:
        """Return the scores on rank 0: task -> metric -> value. Other ranks return an empty dict.

        All ranks call it together.

        Args:
            likelihoods: See `FixedTasks.compute_scores`.
            log: Prints a message if it takes long.

        Raises:
            TrainingError: The harness cannot compute a score. Every rank raises it.
        """
        # JSON has no nan, so the scores are not the result that every rank gets.
        scores: dict[str, dict[str, float]] = {}

        def compute() -> None:
            assert self.tasks is not None, "only rank 0 calls this"
            try:
                scores.update(self.tasks.compute_scores(likelihoods))
            except Exception as error:
                raise TrainingError(
                    "lm-evaluation-harness cannot compute the scores of --eval-tasks "
                    f"({type(error).__name__}: {error}); leave out the task, and evaluate it from "
                    "a checkpoint with tools/evaluate.py"
                ) from error

        self.ranks.call_on_rank_0(compute, "computing the scores of --eval-tasks", log)
        return scores


def prepare_tasks(plan: Plan, ranks: Ranks, log: Callable[[str], None]) -> EvalTasks:
    """Return the tasks of --eval-tasks. All ranks call it together.

    Args:
        plan: The plan of the run.
        ranks: All ranks of the run.
        log: Prints a message if it takes long.

    Raises:
        ConfigError: On every rank. The harness or a tokenizer is missing, a task does not exist or
            cannot be prepared, or it needs generated text.
    """
    config = plan.config
    built: list[FixedTasks] = []
    ranks.call_on_rank_0(lambda: built.append(build_tasks(config)), "preparing --eval-tasks", log)
    tasks = built[0] if built else None
    # Ranks that receive the tensors need only their numbers of dimensions.
    mine = PackedRequests(torch.zeros(0), torch.zeros(0, 0))
    if tasks is not None:
        mine = tasks.requests
    sent = (_broadcast(each, ranks.group) for each in (mine.tokens, mine.lengths))
    requests = PackedRequests(*sent)
    return EvalTasks(requests, tasks, ranks)


def _broadcast(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return rank 0's tensor on every rank of a gloo group of all ranks.

    Args:
        tensor: int32 on the CPU. On the other ranks, only its number of dimensions counts.
        group: The group, or None for one process.
    """
    if group is None:
        return tensor
    shape = torch.tensor(tensor.shape)
    dist.broadcast(shape, src=0, group=group)
    if dist.get_rank(group) != 0:
        tensor = torch.empty(shape.tolist(), dtype=torch.int32)
    dist.broadcast(tensor, src=0, group=group)
    return tensor


def build_tasks(config: Config) -> FixedTasks:
    """Return the tasks with their requests.

    Raises:
        ConfigError: See `prepare_tasks`.
    """
    try:
        return _load_tasks(config)
    except MegatronError:
        raise
    # A task may run any code of its own, and download data. Only a `MegatronError` of rank 0
    # reaches the other ranks.
    except Exception as error:
        raise ConfigError(
            f"--eval-tasks {' '.join(config.batch.eval_tasks)}: lm-evaluation-harness cannot "
            f"prepare them ({type(error).__name__}: {error}); check the tasks and their data with "
            "tools/evaluate.py"
        ) from error


def _load_tasks(config: Config) -> FixedTasks:
    batch = config.batch
    folder = None if batch.eval_tasks_folder is None else Path(batch.eval_tasks_folder)
    manager = find_tasks(
        batch.eval_tasks, folder, names_flag="--eval-tasks", folder_flag="--eval-tasks-folder"
    )
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ConfigError as error:
        raise ConfigError(f"--eval-tasks needs the tokenizer of the data: {error}") from error
    # The harness takes seconds to import, and may be missing.
    from megatron.extras.inference.scoring.harness import FixedTasks

    return FixedTasks(
        manager,
        batch.eval_tasks,
        tokenizer,
        config.model.seq_length,
        num_fewshot=batch.eval_tasks_num_fewshot,
        limit=batch.eval_tasks_limit,
    )
