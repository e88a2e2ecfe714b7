"""The layouts of the equivalence tests, a covering set of what must not change a number.

Invariant: every pair of values of two columns that fits 8 processes and makes sense is in some row
of `LAYOUTS`. A greedy search over all rows has found them, and a test checks the invariant.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product

from equivalence.corpus import SIZES, UNTIED

from megatron.schedule.pipeline import choose_schedule

PROCESSES = 8
LAYERS = 6
RECOMPUTE = {
    "none": "",
    "all": "--checkpoint-activations",
    "half": "--checkpoint-activations --checkpoint-fraction 1/2",
    "core": "--recompute-attention-core",
    "partitioned": "--checkpoint-activations --partition-activations --checkpoint-in-cpu",
}
PARTITIONS = {
    "uniform": "uniform",
    "parameters": "parameters",
    "ends": "type:transformer|embedding",
}
VALUES = (
    (1, 2, 4),
    (1, 2, 4),
    (1, 2, 4),
    (1, 2, 3),
    (False, True),
    ("one stage", "1F1B", "interleaved 1F1B", "GPipe"),
    # "partitioned" equals "all" bit for bit (test_dropout_layouts.py).
    ("none", "all", "half", "core"),
    ("gpt2", "llama", "bloom"),
    (True, False),
    tuple(PARTITIONS),
    ("ramp", "curriculum"),
)
"""The values of each column, in the order of `Layout`'s fields."""


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 1
    sequence: bool = False
    schedule: str = "one stage"
    """The schedule that this layout tests. A ramp of the batch size may begin with GPipe."""
    recompute: str = "none"
    shape: str = "gpt2"
    tied: bool = True
    partition: str = "uniform"
    variation: str = "ramp"
    strategy: str = ""
    """A value of --sharding-strategy, which replaces `zero`. The copies of hsdp have two ranks."""

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def makes_sense(self) -> bool:
        """Whether every value has an effect, and the ranks fit."""
        interleaved = self.schedule == "interleaved 1F1B"
        return (
            1 < self.ranks <= PROCESSES
            and (self.data > 1 or self.zero == 1)
            and (self.tensor > 1 or not self.sequence)
            and (self.pipeline > 1) == (self.schedule != "one stage")
            and (self.pipeline > 1 or self.partition == "uniform")
            and not (interleaved and (LAYERS % self.pipeline or self.partition != "uniform"))
        )

    @property
    def micro_batch_size(self) -> int:
        """The micro-batch size, which is large for fewer microbatches than stages."""
        smallest = SIZES[self.variation][0]
        if self.schedule == "GPipe":
            return max(1, smallest // self.data // (self.pipeline // 2))
        if self.data == 1 and self.pipeline < 4:
            return 2
        return 1

    @property
    def schedules(self) -> set[str]:
        """The schedules that this layout uses."""
        per_rank = LAYERS // self.pipeline if self.schedule == "interleaved 1F1B" else 1
        counts = [size // self.data // self.micro_batch_size for size in SIZES[self.variation]]
        return {choose_schedule(count, self.pipeline, per_rank).name for count in counts}

    @property
    def flags(self) -> str:
        parts = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--pipeline-model-parallel-size {self.pipeline}",
            f"--sharding-strategy {self.strategy}"
            if self.strategy
            else f"--zero-stage {self.zero}",
            f"--micro-batch-size {self.micro_batch_size}",
            f"--pp-partition-method {PARTITIONS[self.partition]}",
            RECOMPUTE[self.recompute],
        ]
        if self.sequence:
            parts.append("--sequence-parallel")
        if self.schedule == "interleaved 1F1B":
            parts.append("--num-layers-per-virtual-pipeline-stage 1")
        if not self.tied:
            parts.append(UNTIED)
        if self.strategy == "hsdp":
            parts.append("--hsdp-shard-size 2")
        return " ".join(parts)

    def __str__(self) -> str:
        """Return the name in reports, which lists what differs from the default."""
        parts = [
            f"{name}{size}"
            for name, size in (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))
            if size > 1
        ]
        parts += [self.strategy or f"zero{self.zero}"] if self.data > 1 else []
        parts += ["sp"] if self.sequence else []
        parts += [self.schedule.split()[0]] if self.pipeline > 1 else []
        parts += [f"recompute_{self.recompute}"] if self.recompute != "none" else []
        parts += [self.partition] if self.partition != "uniform" else []
        return "-".join([*parts, self.shape, "tied" if self.tied else "untied", self.variation])


Pair = tuple[int, object, int, object]


def pairs(layout: Layout) -> set[Pair]:
    """Return each two columns and their values, which the layout covers."""
    return {(i, a, j, b) for (i, a), (j, b) in combinations(enumerate(astuple(layout)), 2)}


def possible() -> Iterator[Layout]:
    """Return every layout that fits and makes sense."""
    return (layout for layout in (Layout(*row) for row in product(*VALUES)) if layout.makes_sense)  # type: ignore[arg-type]


LAYOUTS = [
    Layout(1, 1, 2, 3, False, "one stage", "none", "bloom", True, "uniform", "curriculum"),
    Layout(2, 2, 1, 1, True, "interleaved 1F1B", "core", "gpt2", False, "uniform", "ramp"),
    Layout(1, 2, 4, 2, False, "1F1B", "half", "llama", False, "ends", "ramp"),
    Layout(2, 4, 1, 1, False, "GPipe", "all", "llama", True, "parameters", "curriculum"),
    Layout(4, 1, 2, 2, True, "one stage", "all", "gpt2", False, "uniform", "curriculum"),
    Layout(2, 2, 2, 3, True, "1F1B", "half", "bloom", True, "parameters", "ramp"),
    Layout(4, 2, 1, 1, False, "GPipe", "none", "bloom", False, "ends", "curriculum"),
    Layout(1, 4, 2, 3, False, "GPipe", "core", "gpt2", True, "ends", "ramp"),
    Layout(2, 1, 4, 1, True, "one stage", "half", "llama", False, "uniform", "ramp"),
    Layout(1, 2, 4, 3, False, "interleaved 1F1B", "all", "bloom", True, "uniform", "ramp"),
    Layout(1, 4, 1, 1, False, "1F1B", "core", "gpt2", False, "parameters", "curriculum"),
    Layout(1, 2, 4, 2, False, "GPipe", "none", "gpt2", True, "parameters", "ramp"),
    Layout(4, 1, 2, 3, True, "one stage", "core", "llama", True, "uniform", "ramp"),
    Layout(2, 4, 1, 1, True, "GPipe", "half", "bloom", False, "ends", "curriculum"),
    Layout(2, 2, 2, 2, True, "interleaved 1F1B", "none", "llama", False, "uniform", "ramp"),
    Layout(1, 4, 2, 2, False, "1F1B", "none", "bloom", False, "uniform", "ramp"),
    Layout(1, 2, 4, 2, False, "interleaved 1F1B", "core", "bloom", False, "uniform", "curriculum"),
    Layout(4, 1, 1, 1, False, "one stage", "half", "gpt2", True, "uniform", "ramp"),
    Layout(1, 2, 2, 3, False, "1F1B", "all", "bloom", False, "ends", "ramp"),
    Layout(1, 2, 2, 1, False, "GPipe", "all", "gpt2", True, "uniform", "ramp"),
    Layout(4, 2, 1, 1, True, "1F1B", "half", "bloom", False, "parameters", "curriculum"),
    Layout(4, 2, 1, 1, True, "interleaved 1F1B", "half", "bloom", False, "uniform", "ramp"),
]

STRATEGIES = [
    Layout(1, 1, 4, strategy="hsdp"),
    Layout(1, 1, 4, strategy="ddp"),
    Layout(1, 1, 4, strategy="fsdp"),
    Layout(2, 1, 4, sequence=True, strategy="hsdp"),
    Layout(1, 2, 2, schedule="1F1B", strategy="fsdp"),
    Layout(1, 2, 4, schedule="1F1B", strategy="hsdp"),
]
"""Each --sharding-strategy alone, with tensor parallelism and with a pipeline."""
