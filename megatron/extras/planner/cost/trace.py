"""A predicted step as a trace for Perfetto or chrome://tracing.

Format: the JSON object format of the Trace Event Format of Chrome. Times are microseconds.
"""

from typing import Any

from megatron.extras.planner.cost.pipeline_simulation import SimulatedPipeline
from megatron.extras.planner.cost.step_prediction import StepPrediction


def build_trace(prediction: StepPrediction, pipeline: SimulatedPipeline) -> dict[str, Any]:
    """Return the trace of a step, with one row for each pipeline rank.

    Args:
        prediction: The step.
        pipeline: The simulation of its pipeline.
    """
    events: list[dict[str, Any]] = []
    for rank, visits in enumerate(pipeline.events):
        # Metadata that names the row.
        events.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"pipeline rank {rank}"},
            }
        )
        for event in visits:
            # Perfetto colours events by their names and categories.
            direction = "forward" if event.visit.forward else "backward"
            events.append(
                {
                    "name": f"{direction} {event.visit.microbatch}",
                    "cat": direction,
                    "ph": "X",
                    "ts": 1e6 * event.start,
                    "dur": 1e6 * (event.end - event.start),
                    "pid": 0,
                    "tid": rank,
                    "args": {
                        "microbatch": event.visit.microbatch,
                        "stage": event.visit.stage,
                    },
                }
            )
        events += _build_end(prediction, pipeline.seconds, rank)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _build_end(prediction: StepPrediction, start: float, rank: int) -> list[dict[str, Any]]:
    """Return the events after the pipeline. All ranks wait for the slowest one."""
    found = []
    for name, seconds in (
        ("data-parallel communication", prediction.data_parallel.waited),
        ("optimizer", prediction.optimizer_seconds),
        ("between steps", prediction.job.software.step_gap),
    ):
        if seconds > 0:
            found.append(
                {
                    "name": name,
                    "cat": name,
                    "ph": "X",
                    "ts": 1e6 * start,
                    "dur": 1e6 * seconds,
                    "pid": 0,
                    "tid": rank,
                    "args": {},
                }
            )
        # They follow each other.
        start += seconds
    return found
