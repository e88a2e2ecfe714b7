"""Search the rows of `layouts.csv`, and write them.

    cd tests && python -m equivalence.find_layouts

A greedy search draws layouts and keeps the one with the most new values for its cost, until no
value is missing. It then does the same for pairs, and then for triples. The seed is fixed.
"""

import csv
from dataclasses import astuple
from itertools import combinations

import numpy as np
from equivalence.layouts import FREE, ROWS, VALUES, Layout, possible, required
from numpy.typing import NDArray

NAMES = list(VALUES)
SUITES = {"short": 1, "pairs": 2, "triples": 3}
"""The columns of the combinations that each suite adds."""
CANDIDATES = 3000
PER_LAUNCH = 4
"""The cost of a launch without any rank. Each rank costs 1."""
PER_REFERENCE = 3
"""The cost of a run of one process."""
SEED = 1

Rows = NDArray[np.int64]
"""Indices into `VALUES`. Shape: (layouts, columns)."""


class Missing:
    """The combinations of `strength` columns that no row has yet.

    `flags` has an element for each combination, and `offsets` the first one of each few columns.
    """

    def __init__(self, strength: int) -> None:
        self.columns = np.array(list(combinations(range(len(NAMES)), strength)))
        self.sizes = np.array([len(values) for values in VALUES.values()])
        self.width = int(self.sizes.max())
        span = self.width**strength
        self.offsets = np.arange(len(self.columns)) * span
        self.flags = np.zeros(len(self.columns) * span, bool)
        numbers = {names: i for i, names in enumerate(combinations(NAMES, strength))}
        for combination in required(strength):
            number = numbers[tuple(name for name, _ in combination)]
            values = [VALUES[name].index(value) for name, value in combination]
            self.flags[self.offsets[number] + self._join(np.array(values))] = True

    def _join(self, values: Rows) -> Rows:
        """Return one number for the values of some columns, which are the last dimension."""
        weights = self.width ** np.arange(values.shape[-1])
        result: Rows = values @ weights
        return result

    def locate(self, rows: Rows) -> Rows:
        """Return the positions in `flags` of all combinations of each row."""
        return self.offsets + self._join(rows[:, self.columns])

    def draw(self, random: np.random.Generator) -> dict[int, int]:
        """Return a random combination that is missing: column -> value."""
        position = int(random.choice(np.flatnonzero(self.flags)))
        columns = self.columns[position // self.width ** self.columns.shape[1]].tolist()
        return {each: position // self.width**i % self.width for i, each in enumerate(columns)}


def find_rows(start: Rows, strength: int, ruled: Rows, random: np.random.Generator) -> Rows:
    """Return the rows that cover all combinations of so many columns that `start` does not have.

    Args:
        start: The rows that exist already.
        strength: The number of columns of a combination.
        ruled: All rows that make sense, with any value in the free columns.
        random: The source of the candidates.
    """
    missing = Missing(strength)
    missing.flags[missing.locate(start)] = False
    rows = []
    references = {get_reference(build(row)) for row in start}
    free = [NAMES.index(name) for name in FREE]
    while missing.flags.any():
        wanted = missing.draw(random)
        fits = np.ones(len(ruled), bool)
        for column in wanted.keys() - set(free):
            fits &= ruled[:, column] == wanted[column]
        candidates = random.choice(ruled[fits], CANDIDATES)
        for column in free:
            drawn = random.integers(missing.sizes[column], size=CANDIDATES)
            candidates[:, column] = wanted.get(column, drawn)
        gains = missing.flags[missing.locate(candidates)].sum(axis=1)
        costs = [estimate_cost(row, references) for row in candidates]
        best = candidates[int(np.argmax(gains / costs))]
        rows.append(best)
        references.add(get_reference(build(best)))
        missing.flags[missing.locate(best[None])] = False
    return np.array(rows)


def get_reference(layout: Layout) -> tuple[object, ...]:
    """Return what determines the run of one process that a layout is compared with."""
    return layout.shape, layout.variation, layout.tied, layout.training


def estimate_cost(row: Rows, references: set[tuple[object, ...]]) -> float:
    """Return the relative time of a row, given the runs of one process that exist already."""
    layout = build(row)
    known = get_reference(layout) in references
    return PER_LAUNCH + layout.ranks + (0 if known else PER_REFERENCE)


def build(row: Rows) -> Layout:
    """Return the layout of a row of indices."""
    return Layout(*(VALUES[name][i] for name, i in zip(NAMES, row.tolist(), strict=True)))


def main() -> None:
    random = np.random.default_rng(SEED)
    ruled = np.array(
        [
            [VALUES[name].index(v) for name, v in zip(NAMES, astuple(layout), strict=True)]
            for layout in possible()
        ]
    )
    found = np.empty((0, len(NAMES)), np.int64)
    with open(ROWS, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["suite", *NAMES])
        for suite, strength in SUITES.items():
            rows = find_rows(found, strength, ruled, random)
            found = np.concatenate([found, rows])
            layouts = [build(row) for row in rows]
            if suite == "triples":
                # Rows with the same reference are neighbours.
                layouts.sort(key=get_reference)
            writer.writerows([suite, *astuple(layout)] for layout in layouts)
            print(f"{suite}: {len(rows)} rows")


if __name__ == "__main__":
    main()
