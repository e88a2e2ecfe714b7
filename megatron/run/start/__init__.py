"""The start of a run: the ranks meet, compare their command lines, and build a `Run`.

A `Launch` (`launch`) becomes a `Job` (`job`), and a `Job` becomes a `Run` (`build`). In the order
of execution: `launch` before torch is imported, `meet`, `job`, which uses `resume`, and `build`.
Rank 0 alone resolves the configuration.
"""
