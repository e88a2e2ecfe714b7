"""A plan as JSON. The rank that has resolved it sends it to the others."""

from dataclasses import asdict, fields
from typing import Any, get_type_hints

from megatron.base.json_record import restore
from megatron.config.compare import load_yaml
from megatron.config.yaml_file import dump_yaml
from megatron.model.partition import Stage
from megatron.model.shape import ModelShape
from megatron.plan.run_plan import Plan
from megatron.schedule.batch_size import (
    BatchSizeSchedule,
    ConstantBatchSize,
    RampupBatchSize,
    StepBatchSize,
)

_BATCH_SIZES: dict[str, type[BatchSizeSchedule]] = {
    "constant": ConstantBatchSize,
    "rampup": RampupBatchSize,
    "steps": StepBatchSize,
}


def record_plan(plan: Plan) -> dict[str, Any]:
    """Return a plan without errors as JSON."""
    record = {field.name: getattr(plan, field.name) for field in fields(plan)}
    # The shape consists of the configuration and the sizes of the vocabulary.
    del record["shape"]
    # A batch size of a class that is not in the table fails here, on rank 0.
    (kind,) = [name for name, kind in _BATCH_SIZES.items() if kind is type(plan.batch_size)]
    return record | {
        "config": dump_yaml(plan.config),
        "stages": [
            [stage.index, stage.layers.start, stage.layers.stop, stage.first, stage.last]
            for stage in plan.stages
        ],
        "batch_size": {"kind": kind, **asdict(plan.batch_size)},
        "lr_schedule": asdict(plan.lr_schedule),
        "curriculum": None if plan.curriculum is None else asdict(plan.curriculum),
        "data_phases": [asdict(planned) for planned in plan.data_phases],
    }


def restore_plan(record: dict[str, Any]) -> Plan:
    """Return the plan that `record_plan` recorded. Nothing is derived, and no file is read."""
    config = load_yaml(record["config"], fast=True)
    batch_size = dict(record["batch_size"])
    restored = {
        "config": config,
        "shape": ModelShape(config.model, record["vocab_size"], record["padded_vocab_size"]),
        "stages": tuple(
            Stage(index, range(start, stop), first=first, last=last)
            for index, start, stop, first, last in record["stages"]
        ),
        "batch_size": restore(_BATCH_SIZES[batch_size.pop("kind")], batch_size),
    }
    hints = get_type_hints(Plan)
    others = {name: restore(hints[name], record[name]) for name in record.keys() - restored.keys()}
    return Plan(**restored, **others)
