"""The order in which pipeline ranks run their microbatches, and its cost in time and memory.

Invariant: every choice is one that its schedule in `torch.distributed.pipelining` accepts. Costs
hold for stages of equal duration and free communication. They are counted in visits. A visit is one
microbatch's forward and backward pass through one stage.

A new schedule also needs the class of torch in `engine/pipeline_runner.py`. `model/partition.py`
expects the embedding and the head on different ranks.

Sources:

- GPipe: https://arxiv.org/abs/1811.06965.
- 1F1B and interleaved 1F1B: https://arxiv.org/abs/2104.04473, section 2.2.
- Looped BFS: https://arxiv.org/abs/2211.05953.

Notation: m microbatches of a step on one data-parallel rank, p pipeline ranks, v virtual stages on
each rank.
"""

from dataclasses import dataclass
from typing import Literal

Name = Literal["one stage", "1F1B", "GPipe", "interleaved 1F1B", "looped BFS"]


@dataclass(frozen=True)
class PipelineSchedule:
    """The schedule of one step, as `choose_schedule` chooses it."""

    name: Name
    microbatches: int
    ranks: int
    stages_per_rank: int

    @property
    def bubble(self) -> float:
        """Fraction of the step's time during which a rank is idle, from 0 to 1."""
        return compute_bubble_fraction(self.microbatches, self.ranks, self.stages_per_rank)

    def count_in_flight(self, rank: int) -> int:
        """Return the largest number of visits whose activations pipeline rank `rank` keeps at once.

        These are forward passes that started before the backward passes that free them. Each has
        the activations of one (virtual) stage.

        1F1B keeps min(p - rank, m). Interleaved 1F1B keeps up to (v - 1) r + 2 (p - 1 - rank) + 1,
        where rounds of r microbatches pass one stage after the other. With r = p, rank 0 has v p +
        p - 1. That is 1 + (p - 1)/(p v) times the layers of 1F1B (https://arxiv.org/abs/2205.05198,
        section 4.2.3). The others run all forward passes first.
        """
        m = self.microbatches
        p = self.ranks
        v = self.stages_per_rank
        if self.name == "one stage":
            return 1
        if self.name == "1F1B":
            # The last rank frees a microbatch immediately. Each earlier rank starts one more
            # forward pass first.
            return min(p - rank, m)
        if self.name == "interleaved 1F1B":
            return min((v - 1) * (m // _count_rounds(m, p)) + 2 * (p - 1 - rank) + 1, v * m)
        # GPipe and looped BFS free nothing before the last forward pass.
        return v * m

    def describe(self, batch_size: int) -> str:
        """Return a sentence for the log. `batch_size` is in samples."""
        if self.name == "one stage":
            return "pipeline: one stage"
        virtual = ""
        if self.stages_per_rank > 1:
            virtual = f" of {self.stages_per_rank} virtual stages"
        places = f"{self.ranks} {'ranks' if virtual else 'stages'}{virtual}"
        return (
            f"pipeline: {self.name}, {format_microbatches(self.microbatches)} for {places}: ranks "
            f"are idle for {100 * self.bubble:.0f} % of the time at batch size {batch_size}"
        )


def choose_schedule(m: int, p: int, v: int) -> PipelineSchedule:
    """Return the schedule of `m` microbatches on `p` pipeline ranks with `v` virtual stages each.

    1F1B keeps the fewest activations, but needs at least one microbatch for each stage. GPipe
    accepts fewer. Interleaved 1F1B needs the same number of microbatches in each of its rounds, of
    which there are max(1, m // p). Looped BFS accepts any number and needs more memory.
    """
    assert m >= 1, f"{m} microbatches"
    assert p >= 1, f"{p} pipeline ranks"
    assert v >= 1, f"{v} virtual stages a rank"
    # Virtual stages on one rank would have no pipeline to fill.
    assert p > 1 or v == 1, f"{v} virtual stages on a single rank"
    name: Name
    if p == 1:
        name = "one stage"
    elif v == 1:
        name = "1F1B"
        # torch's 1F1B raises an error if there are fewer microbatches than stages.
        if m < p:
            name = "GPipe"
    else:
        name = "interleaved 1F1B"
        # torch's interleaved 1F1B raises an error if its rounds do not divide the microbatches.
        if m % _count_rounds(m, p):
            name = "looped BFS"
    return PipelineSchedule(name, m, p, v)


def compute_bubble_fraction(m: int, p: int, v: int) -> float:
    """Return the fraction of a step's time during which a rank is idle, from 0 to 1.

    It is (p - 1)/(v m + p - 1) if m >= p. The paper gives the bubble over the ideal time, which is
    (p - 1)/(v m). With fewer microbatches than ranks, a rank additionally waits p - m visits in
    each of its v - 1 later rounds. It waits until the first microbatch comes around again.
    """
    # p - 1 visits pass until the first microbatch has reached the last rank and the last one has
    # come back.
    waiting = p - 1 + (v - 1) * max(0, p - m)
    return waiting / (v * m + waiting)


def format_microbatches(m: int) -> str:
    """Return '1 microbatch', '2 microbatches' and so on."""
    return f"{m} microbatch{'' if m == 1 else 'es'}"


def _count_rounds(m: int, p: int) -> int:
    """Return the rounds of the interleaved schedule.

    They are as many as have at least p microbatches each, or one.
    """
    return max(1, m // p)
