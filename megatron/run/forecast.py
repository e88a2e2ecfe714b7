"""What a run by time is expected to see, and the report at its end."""

from megatron.data.epochs import describe_epochs, measure_training_data, warn_about_many_epochs
from megatron.observe.log_line import compute_perplexity
from megatron.observe.report import EvaluationResult
from megatron.run.run import Run
from megatron.schedule.clock import format_duration

_LARGEST_CLOSING_SHARE = 0.25
"""Largest part of the time that the work after the last step may take without a warning."""


def report_forecast(run: Run) -> None:
    """Print what a run by time is expected to see, once a launch."""
    found = run.clock.take_forecast()
    # Every rank takes its forecast, which is made once. Only rank 0 prints.
    if found is None or run.mesh.rank != 0:
        return
    tokens, lines = found
    plan = run.plan
    uses = measure_training_data(
        plan.config.data,
        round(tokens),
        run.sources.registry.open,
        plan.data_phases,
        round(tokens / plan.config.model.seq_length),
        plan.config.model.seq_length,
    )
    if uses:
        lines.append(f"training data: {describe_epochs(uses)}")
    for warning in warn_about_many_epochs(uses):
        lines.append(f"warning: {warning}")
    for line in lines:
        run.reporter.log(line)


def report_end(run: Run) -> None:
    """Print what a run by time has trained and reached, when it is complete."""
    plan = run.plan
    state = run.state
    if plan.train_seconds is None:
        return
    seconds = run.clock.read()
    tokens = state.consumed_tokens
    model = plan.config.model
    rows = [
        (
            "model",
            f"{plan.parameters:,} parameters, {model.num_layers} layers, hidden size "
            f"{model.hidden_size}, {model.num_attention_heads} heads",
        ),
        (
            "trained",
            f"{tokens:,} tokens in {state.iteration:,} iterations, "
            f"{tokens / plan.parameters:.3g} tokens per parameter",
        ),
        (
            "time",
            f"{format_duration(seconds)} of {format_duration(plan.train_seconds)}, evaluations "
            "and saves included",
        ),
        ("speed", f"{tokens / max(seconds, 1e-9):,.0f} tokens/s over this time"),
        ("learning rate", f"{state.compute_learning_rate(plan.lr_schedule):.6E} at the end"),
    ]
    for name, (iteration, result) in run.reporter.evaluated.items():
        rows.append((name, f"{_describe_result(result)} (iteration {iteration})"))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}  {text}" for name, text in rows]
    run.reporter.log("\n".join(["report of the run:", *lines]))
    closing = run.clock.costs.expect(0).closing
    if closing > _LARGEST_CLOSING_SHARE * plan.train_seconds:
        run.reporter.log(
            f"warning: the last save, validation and test take about {format_duration(closing)} of "
            f"--train-time {plan.config.batch.train_time}. Lower --eval-iters, or give more time"
        )


def _describe_result(result: EvaluationResult) -> str:
    """Return all measures of an evaluation in one line."""
    parts = [f"loss {result.loss:.4f}", f"perplexity {compute_perplexity(result.loss):.2f}"]
    if result.bits_per_byte is not None:
        parts.append(f"bits per byte {result.bits_per_byte:.4f}")
    return ", ".join([*parts, f"next-token accuracy {100 * result.accuracy:.2f} %"])
