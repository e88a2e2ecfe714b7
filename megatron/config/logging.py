"""What a run tells, and where."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoggingConfig:
    log_interval: int = 100
    """Iterations between log lines."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events; one event file for each launch."""
    tensorboard_queue_size: int = 1000
    """Events kept in memory before they are written."""
    tensorboard_log_interval: int = 1
    """Iterations between TensorBoard points."""
    log_timers_to_tensorboard: bool = False
    """Write the times of a step's parts."""
    log_batch_size_to_tensorboard: bool = False
    """Write the global batch size."""
    log_validation_ppl_to_tensorboard: bool = False
    """Write the perplexity beside the validation loss."""
    log_learning_rate_to_tensorboard: bool = True
    """Write the learning rate."""
    log_loss_scale_to_tensorboard: bool = True
    """Write the loss scale (fp16)."""
    log_num_zeros_in_grad: bool = False
    """Count the gradient's zeros in each step and log them."""
    log_params_norm: bool = False
    """Log the norm of the parameters."""
    metrics_file: str | None = None
    """JSON lines, one for each iteration. Default: metrics.jsonl in --save."""
    codecarbon_dir: str | None = None
    """Folder for codecarbon's emissions; off by default."""
    codecarbon_country_iso_code: str = "FRA"
    """Country whose energy mix codecarbon reckons with (it asks no network)."""
    peak_tflops_per_device: float | None = None
    """The device's peak in TFLOPs for MFU. Default: known GPUs by name; elsewhere MFU is not printed."""
    show_progress: bool = False
    """Show a progress bar when the output is a terminal."""
