"""What a run by time is expected to see, and the report at its end."""

from megatron.data.epochs import describe_epochs, measure_training_data, warn_of_many_epochs
from megatron.training.run import Run


def report_forecast(run: Run) -> None:
    """Print what a run by time is expected to see, once a launch."""
    found = run.clock.take_forecast()
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
    )
    if uses:
        lines.append(f"training data: {describe_epochs(uses)}")
    for warning in warn_of_many_epochs(uses):
        lines.append(f"warning: {warning}")
    for line in lines:
        run.reporter.say(line)
