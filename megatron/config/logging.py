"""What a run logs, and where."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron.config.interval import COUNT, POSITIVE, RANKS
from megatron.schedule.skip import parse_range

LogFormat = Literal["short", "megatron"]
ALL_RANKS = -1
"""The number in --profile-ranks that stands for every rank."""


@dataclass(frozen=True)
class LoggingConfig:
    """Settings of the log, TensorBoard, metrics and energy measurement."""

    log_interval: int = 100
    """Iterations between log lines."""
    log_format: LogFormat | None = None
    """Form of the log line. megatron: that of Megatron-DeepSpeed, which scripts parse. short: fits
    into a terminal. Default: short if the output is a terminal, otherwise megatron."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events. Each launch writes one event file."""
    tensorboard_queue_size: int = 1000
    """Events kept in memory before they are written."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""
    log_timers_to_tensorboard: bool = False
    """Write the times of the parts of a step."""
    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity together with the validation loss."""
    log_learning_rate_to_tensorboard: bool = True
    """Write the learning rate."""
    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale (fp16)."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros in the gradient in each step and log them."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    log_layer_stats_interval: int | None = None
    """Iterations between statistics of each transformer layer, in TensorBoard and the metrics file:
    root mean square of its output, norms of its gradient (before clipping) and of its parameters,
    and its largest attention logit. The largest output logit is also logged. Default: off."""
    metrics_file: str | None = None
    """File of JSON lines, one for each iteration. Default: metrics.jsonl in --save."""
    verification: str | None = None
    """Report of megatron-verify --report FILE. The run keeps a copy in --save, shows its verdict in
    the chronicle, and warns about settings that differ from those that were verified."""
    tracker: tuple[Literal["trackio", "wandb"], ...] = ()
    """Experiment trackers that get the numbers of the metrics file, each by a process of its own.
    It needs --save, which also stores the ids of the runs. wandb works offline if it has no key."""
    tracker_project: str = "megatron-3d"
    """Project that the trackers show the run in."""
    codecarbon_dir: str | None = None
    """Folder for codecarbon's emissions. Default: off."""
    codecarbon_country_iso_code: str = "FRA"
    """Country whose energy mix codecarbon uses. It makes no network requests."""
    peak_tflops_per_device: Annotated[float | None, POSITIVE] = None
    """The device's peak in TFLOPs, for MFU. Default: known for some GPUs by name. For others MFU is
    not printed."""
    show_progress: bool = False
    """Show a progress bar if the output is a terminal."""
    profile_iterations: str | None = None
    """Iterations that PyTorch's profiler records, as FIRST-LAST, both included. Each of
    --profile-ranks writes a trace for chrome://tracing, ui.perfetto.dev or TensorBoard."""
    profile_ranks: Annotated[tuple[int, ...], RANKS] = (0,)
    """Ranks that write traces and memory snapshots. -1: all ranks."""
    profile_dir: str | None = None
    """Folder for traces and memory snapshots. Default: profile in --save, or in --tensorboard-dir
    without --save."""
    memory_snapshot: bool = False
    """Record the history of CUDA memory on --profile-ranks, and write a snapshot for
    pytorch.org/memory_viz if memory runs out. A snapshot is a pickle: open only your own."""
    memory_snapshot_iterations: Annotated[tuple[int, ...], COUNT] = ()
    """With --memory-snapshot, also write a snapshot after each of these iterations."""

    @property
    def profiling_field(self) -> str | None:
        """The field that requests traces or snapshots, or None."""
        if self.profile_iterations is not None:
            return "logging.profile_iterations"
        return "logging.memory_snapshot" if self.memory_snapshot else None

    def parse_profile_iterations(self) -> tuple[int, int] | None:
        """Return the first and the last iteration of the trace, or None without a trace.

        Raises:
            ConfigError: --profile-iterations is not FIRST-LAST.
        """
        if self.profile_iterations is None:
            return None
        return parse_range(self.profile_iterations, "--profile-iterations")

    def choose_profile_folder(self, save_folder: str | None) -> str | None:
        """Return the folder of traces and snapshots, or None if none can be derived.

        Args:
            save_folder: See `CheckpointConfig.save_folder`.
        """
        if self.profile_dir is not None:
            return self.profile_dir
        # Not below --tensorboard-dir if there is a choice, because that folder is often uploaded.
        parent = save_folder or self.tensorboard_dir
        return f"{parent}/profile" if parent is not None else None
