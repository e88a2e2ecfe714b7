"""How much is trained, with which batch sizes, and when to stop."""

from dataclasses import dataclass
from typing import Annotated

from megatron.config.interval import AT_LEAST_ONE, COUNT, NOT_NEGATIVE, POSITIVE, Range


@dataclass(frozen=True)
class BatchConfig:
    """Settings of the batch size, the length of training, evaluation and stopping."""

    micro_batch_size: Annotated[int, Range("[1, 1e9]")]
    """Samples that one rank passes through the model at once."""
    global_batch_size: Annotated[int | None, Range("[1, 1e9]")] = None
    """Samples of one iteration over all ranks. Default: micro-batch size x data-parallel size."""
    gradient_accumulation_steps: int | None = None
    """Microbatches of each data-parallel rank in one iteration, instead of --global-batch-size. The
    batch then grows with the number of ranks. Default: what the global batch size gives."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """START INCREMENT SAMPLES: start with START and add INCREMENT at even steps over SAMPLES
    samples, up to the global batch size."""
    step_batch_size_schedule: tuple[str, ...] | None = None
    """'0:768 250B:1536': batch size from each threshold on. Thresholds are tokens with a suffix K,
    M, B or T, rounded down to samples. 61035156250tokens and 30_000_000samples name their unit. A
    bare threshold above 0 is an error: it means tokens in Megatron-LM, and meant samples in earlier
    versions."""
    train_iters: Annotated[int | None, COUNT] = None
    """Iterations to train. Give this or --train-samples."""
    train_samples: Annotated[int | None, COUNT] = None
    """Samples to train. Give this or --train-iters."""
    train_tokens: int | None = None
    """Stop after this many tokens. Give it together with --train-iters or --train-samples."""
    train_time: str | None = None
    """Time to train, as 3h, 90m, 45s, 2d or 2h30m, instead of --train-iters or --train-samples. The
    last save and the last evaluation are inside it, the start of a launch is not. The learning rate
    follows the time. A resumed run goes on with what is left of it."""
    skip_train_iteration_range: tuple[str, ...] = ()
    """FIRST-LAST ... (inclusive): drop the batches of these iterations without training on them, to
    skip bad data."""
    # `numpy.random.RandomState` takes seeds of 32 bits.
    seed: Annotated[int, Range("[0, 4294967295]")] = 1234
    """Seed of weights, dropout and the order of samples."""
    eval_iters: Annotated[int, NOT_NEGATIVE] = 100
    """Batches of one evaluation. 0 turns evaluation off."""
    eval_interval: int = 1000
    """Iterations between evaluations."""
    eval_tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness that are evaluated during training. Only tasks that score
    given texts. tools/evaluate.py evaluates all kinds from a checkpoint."""
    eval_tasks_interval: Annotated[int | None, AT_LEAST_ONE] = None
    """Iterations between evaluations of --eval-tasks. They also run at the end of training."""
    eval_tasks_folder: str | None = None
    """Folder with further tasks as YAML files."""
    eval_tasks_num_fewshot: Annotated[int | None, NOT_NEGATIVE] = None
    """Examples in each prompt of --eval-tasks. Default: that of the task."""
    eval_tasks_limit: Annotated[int | None, AT_LEAST_ONE] = None
    """Evaluate only the first items of each of --eval-tasks. Default: all."""
    eval_interval_time: str | None = None
    """Time between evaluations, as 10m, instead of --eval-interval."""
    eval_only: bool = False
    """Load a checkpoint, evaluate the first --eval-iters batches of every validation and test set,
    and --eval-tasks, and exit. It needs no learning-rate schedule."""
    exit_interval: int | None = None
    """Save and exit at iterations divisible by this."""
    exit_duration_in_mins: Annotated[float | None, POSITIVE] = None
    """Save and exit this many minutes after the start of this process."""
    kill_switch_path: str | None = None
    """Save and exit as soon as this file exists. The run does not start while it exists."""
    max_nan_iterations: int = 10
    """Stop after this many iterations in a row whose loss or gradient is not finite. Such steps are
    dropped and never trained on."""
