"""What checkpoints on an object store take in time and money."""

from dataclasses import dataclass

from megatron.base.plain_text import is_url
from megatron.extras.object_store.objects import PART
from megatron.extras.planner.cost.hardware import Hardware
from megatron.plan.run_plan import Plan
from megatron.run.start.launch import count_checkpoint_bytes

_MONTH_SECONDS = 30 * 86400


@dataclass(frozen=True)
class StoreOptions:
    """What is assumed about a store. The prices are list prices of S3 in us-east-1."""

    gb_per_second: float = 1.0
    price: float = 0.023
    """Dollars for a GB and month."""
    write_price: float = 0.005
    """Dollars for 1,000 requests that write."""


@dataclass(frozen=True)
class StoragePlan:
    """The checkpoints of a run on a store."""

    bytes: int
    """Bytes of a checkpoint."""
    upload_seconds: float
    load_seconds: float
    saves: float
    """Checkpoints of a month of training. 0 without --save-interval."""
    kept: float
    """Checkpoints that are stored at the end of that month."""
    dollars: float
    """What the first month costs: requests, and the storage that grows up to `kept`."""
    dollars_later: float
    """What it costs for each later month to keep these checkpoints."""


def plan_storage(
    plan: Plan, hardware: Hardware, step_seconds: float, options: StoreOptions
) -> StoragePlan | None:
    """Predict the time and the price of a run's checkpoints on a store.

    None if --save is no address.

    Args:
        plan: The plan, with --save-interval and --keep-latest-checkpoints.
        hardware: The devices. All nodes transfer their parts at the same time.
        step_seconds: Predicted seconds of an iteration.
        options: What is assumed about the store.
    """
    config = plan.config.checkpoint
    if not is_url(config.save or ""):
        return None
    size = count_checkpoint_bytes(plan)
    nodes = -(-plan.world_size // hardware.ranks_per_node)
    seconds = size / (nodes * options.gb_per_second * 1e9)
    saves = 0.0
    if config.save_interval:
        saves = _MONTH_SECONDS / (step_seconds * config.save_interval)
    # While a checkpoint is uploaded, the ones before it are still there.
    most = saves
    if config.keep_latest_checkpoints is not None:
        most = min(saves, config.keep_latest_checkpoints + 1)
    monthly = options.price * size / 1e9
    # The storage grows evenly to its maximum, and stays there.
    mean = most * (1 - most / (2 * saves)) if saves else 0.0
    # Each rank's last part is not full, so a request for each rank is added.
    writes = saves * (size / PART + plan.world_size)
    return StoragePlan(
        bytes=size,
        upload_seconds=seconds,
        load_seconds=seconds,
        saves=saves,
        kept=most,
        dollars=mean * monthly + options.write_price * writes / 1000,
        dollars_later=most * monthly,
    )


def describe_storage(plan: Plan, found: StoragePlan, options: StoreOptions) -> str:
    """Return the prediction in words."""
    text = (
        f"{found.bytes / 1e9:,.3g} GB upload in {found.upload_seconds:,.3g} s and load in "
        f"{found.load_seconds:,.3g} s at {options.gb_per_second:g} GB/s for each node"
    )
    if not found.saves:
        return text
    interval = plan.config.checkpoint.save_interval
    return (
        f"{text}; --save-interval {interval} gives {found.saves:,.0f} a month for "
        f"${found.dollars:,.2f}, and ${found.dollars_later:,.2f} for each month that the last "
        f"{found.kept:,.0f} are kept"
    )
