"""The loss that a ladder of small runs foretold for a run, and whether the run keeps to it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron.base.durable import replace_file
from megatron.base.errors import DataError
from megatron.base.outside_file import load_json
from megatron.extras.operations.chronicle.records import EvaluationPoint, Event

FILE = "predicted_loss.json"


@dataclass(frozen=True)
class PredictedLoss:
    """The validation loss at the end of a run."""

    iteration: int
    """The last iteration of the run."""
    loss: float
    low: float
    high: float
    """The loss is between `low` and `high` with a probability of 95 %."""


def write_predicted_loss(folder: Path, predicted: PredictedLoss) -> None:
    """Write a prediction into the folder of a run, which may not have started."""
    # A prediction is made before the run, which creates the folder otherwise.
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / FILE, json.dumps(asdict(predicted)) + "\n")


def read_predicted_loss(folder: Path) -> PredictedLoss | None:
    """Return the prediction in the folder of a run, or None.

    Raises:
        DataError: The file is damaged.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = load_json(path)
        numbers = (float(found[name]) for name in ("loss", "low", "high"))
        return PredictedLoss(int(found["iteration"]), *numbers)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error!r}): write it again with ladder.py predict --run, or "
            "remove it."
        ) from error


def list_departures(
    predicted: PredictedLoss | None, evaluations: Sequence[EvaluationPoint]
) -> Iterator[Event]:
    """Yield an event for the first evaluation of each set that leaves the range.

    The law is that of complete runs. So a loss above the range counts only at the end, and one
    below it at any time.
    """
    if predicted is None:
        return
    seen: set[str] = set()
    for each in evaluations:
        side = "below" if each.loss < predicted.low else "above"
        inside = predicted.low <= each.loss <= predicted.high
        early = each.iteration < predicted.iteration and side == "above"
        if inside or early or each.name in seen or not each.kept:
            continue
        # All later evaluations would say the same.
        seen.add(each.name)
        text = (
            f"the loss of {each.name} is {each.loss:.4f}, {side} the predicted range of "
            f"{predicted.low:.4f} to {predicted.high:.4f} for iteration {predicted.iteration:,}"
        )
        time = datetime.fromtimestamp(each.time, UTC)
        yield Event(time, "prediction", each.iteration, {"text": text})
