"""The layouts of the equivalence tests, covering sets of what must not change a number.

Invariants: each value is in a row of `SHORT`, each pair of values in one of `PAIRS`, and each
triple of values in one of `PAIRS` or `TRIPLES`, if any layout that fits 8 processes and makes sense
has them. `find_layouts.py` has found the rows, and tests check the invariants.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import combinations, product
from pathlib import Path

from equivalence.corpus import DOCUMENTS, DROPOUT, GOLDFISH, OPTIMIZERS, SIZES, UNTIED

from megatron.schedule.pipeline_schedule import choose_schedule

PROCESSES = 8
LAYERS = 6
ROWS = Path(__file__).with_name("layouts.csv")
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


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sharding: int | str = 1
    """A --zero-stage or a --sharding-strategy. The shards of hsdp are on two ranks."""
    sequence: bool = False
    schedule: str = "one stage"
    """The schedule that this layout tests. A ramp of the batch size may begin with GPipe."""
    recompute: str = "none"
    shape: str = "gpt2"
    tied: bool = True
    partition: str = "uniform"
    variation: str = "ramp"
    micro_batch_size: int = 1
    context: str = "none"
    """none, or a --cp-comm-type with which two ranks share each sequence."""
    masks: str = "none"
    """none, or documents: attention, positions and loss end where a sentence ends."""
    goldfish: bool = False
    optimizer: str = "adam"
    dropout: bool = False

    @property
    def copies(self) -> int:
        """The number of ranks with the same parameters, which can be sharded over them."""
        return self.data * (1 if self.context == "none" else 2)

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.copies

    @property
    def makes_sense(self) -> bool:
        """Whether every value has an effect, and the ranks fit."""
        interleaved = self.schedule == "interleaved 1F1B"
        samples = self.data * self.micro_batch_size
        return (
            1 < self.ranks <= PROCESSES
            and (self.copies > 1 or self.sharding == 1)
            and (self.copies > 2 or self.sharding != "hsdp")
            and (self.tensor > 1 or not self.sequence)
            and (self.pipeline > 1 or self.partition == "uniform")
            and not (interleaved and (LAYERS % self.pipeline or self.partition != "uniform"))
            and not any(size % samples for size in SIZES[self.variation])
            and self.schedule in self.schedules
        )

    @property
    def schedules(self) -> set[str]:
        """The schedules that this layout uses in the first six iterations."""
        per_rank = LAYERS // self.pipeline if self.schedule == "interleaved 1F1B" else 1
        if self.pipeline == 1 < per_rank:
            return set()
        counts = [size // self.data // self.micro_batch_size for size in SIZES[self.variation]]
        return {choose_schedule(count, self.pipeline, per_rank).name for count in counts}

    @property
    def training(self) -> str:
        """The flags of masks, loss, optimizer and dropout, which one process gets too."""
        masks = DOCUMENTS if self.masks == "documents" else ""
        loss = GOLDFISH if self.goldfish else ""
        # It follows flags that turn dropout off, and the last one takes effect.
        dropout = DROPOUT if self.dropout else ""
        return f"{masks} {loss} {OPTIMIZERS.get(self.optimizer, '')} {dropout}"

    @property
    def flags(self) -> str:
        """The flags of the ranks, and those of an untied embedding."""
        by_stage = isinstance(self.sharding, int)
        parts = [
            f"--tensor-model-parallel-size {self.tensor}",
            f"--pipeline-model-parallel-size {self.pipeline}",
            f"{'--zero-stage' if by_stage else '--sharding-strategy'} {self.sharding}",
            f"--micro-batch-size {self.micro_batch_size}",
            f"--pp-partition-method {PARTITIONS[self.partition]}",
            RECOMPUTE[self.recompute],
        ]
        if not self.tied:
            parts.append(UNTIED)
        if self.sequence:
            parts.append("--sequence-parallel")
        if self.context != "none":
            parts.append(f"--context-parallel-size 2 --cp-comm-type {self.context}")
        if self.schedule == "interleaved 1F1B":
            parts.append("--num-layers-per-virtual-pipeline-stage 1")
        if self.sharding == "hsdp":
            parts.append("--hsdp-shard-size 2")
        return " ".join(parts)

    def __str__(self) -> str:
        """Return the name in reports, which lists what differs from the default."""
        parts = [
            f"{name}{size}"
            for name, size in (("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data))
            if size > 1
        ]
        parts += [self.context] if self.context != "none" else []
        if self.copies > 1:
            stage = f"zero{self.sharding}"
            parts.append(stage if isinstance(self.sharding, int) else self.sharding)
        parts += ["sp"] if self.sequence else []
        parts += [self.schedule.split()[0]] if self.pipeline > 1 else []
        parts += [f"recompute_{self.recompute}"] if self.recompute != "none" else []
        parts += [self.partition] if self.partition != "uniform" else []
        parts += [f"micro{self.micro_batch_size}"] if self.micro_batch_size > 1 else []
        parts += [self.shape, "tied" if self.tied else "untied", self.variation]
        parts += [self.masks] if self.masks != "none" else []
        parts += ["goldfish"] if self.goldfish else []
        parts += [self.optimizer] if self.optimizer != "adam" else []
        parts += ["dropout"] if self.dropout else []
        return "-".join(parts)


VALUES = {
    "tensor": (1, 2, 4),
    "pipeline": (1, 2, 4),
    "data": (1, 2, 4),
    # fsdp is another name of stage 3 (`STRATEGIES`).
    "sharding": (1, 2, 3, "ddp", "hsdp"),
    "sequence": (False, True),
    "schedule": ("one stage", "1F1B", "interleaved 1F1B", "GPipe"),
    # "partitioned" equals "all" bit for bit (test_dropout_layouts.py).
    "recompute": ("none", "all", "half", "core"),
    "shape": ("gpt2", "llama", "bloom"),
    "tied": (True, False),
    "partition": tuple(PARTITIONS),
    "variation": ("ramp", "curriculum"),
    "micro_batch_size": (1, 2, 4),
    "context": ("none", "allgather", "a2a"),
    "masks": ("none", "documents"),
    "goldfish": (False, True),
    # The layouts of any other one are in test_optimizers.py.
    "optimizer": ("adam", "ademamix", "muon"),
    "dropout": (False, True),
}
"""The values of each column, in the order of `Layout`'s fields."""
FREE = ("recompute", "shape", "tied", "masks", "goldfish", "optimizer", "dropout")
"""The columns whose values make sense with all values of the others."""

Combination = tuple[tuple[str, object], ...]
"""Some columns and their values."""


def possible() -> Iterator[Layout]:
    """Return every layout that makes sense, with the first value of each free column."""
    columns = [values[:1] if name in FREE else values for name, values in VALUES.items()]
    layouts = (Layout(*row) for row in product(*columns))  # type: ignore[arg-type]
    return (layout for layout in layouts if layout.makes_sense)


def covered(layouts: Iterable[Layout], strength: int) -> set[Combination]:
    """Return all combinations of so many columns that are in some layout."""
    return {
        combination
        for layout in layouts
        for combination in combinations(zip(VALUES, astuple(layout), strict=True), strength)
    }


def required(strength: int) -> set[Combination]:
    """Return all combinations of so many columns that some layout that makes sense has."""
    ruled = [name for name in VALUES if name not in FREE]
    layouts = list(possible())
    found = set()
    for columns in combinations(VALUES, strength):
        chosen = [name for name in columns if name in ruled]
        for row in {tuple(getattr(layout, name) for name in chosen) for layout in layouts}:
            of_ruled = dict(zip(chosen, row, strict=True))
            values = [(of_ruled[name],) if name in ruled else VALUES[name] for name in columns]
            found |= {tuple(zip(columns, each, strict=True)) for each in product(*values)}
    return found


def _read_rows(suite: str) -> list[Layout]:
    """Read the layouts of a suite: "short", "pairs" or "triples"."""
    with open(ROWS, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["suite"] == suite]
    parsers = {name: {str(value): value for value in values} for name, values in VALUES.items()}
    return [Layout(*(parsers[name][row[name]] for name in VALUES)) for row in rows]  # type: ignore[arg-type]


SHORT = _read_rows("short")
"""The layouts of the short suite."""
PAIRS = [*SHORT, *_read_rows("pairs")]
TRIPLES = _read_rows("triples")
"""The layouts that are added for the triples, in the order of the models that they train."""

STRATEGIES = [
    Layout(1, 1, 4, "hsdp"),
    Layout(1, 1, 4, "ddp"),
    Layout(1, 1, 4, "fsdp"),
    Layout(2, 1, 4, "hsdp", sequence=True),
    Layout(1, 2, 2, "fsdp", schedule="1F1B"),
    Layout(1, 2, 4, "hsdp", schedule="1F1B"),
]
"""Each --sharding-strategy alone, with tensor parallelism and with a pipeline."""
