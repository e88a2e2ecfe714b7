"""The start of a run: the ranks meet, compare their command lines, and build a `Run`.

In the order of execution: `refusals` before torch is imported, `join`, `agreement`, `job`, which
uses `resume`, and `setup`. Rank 0 alone resolves the configuration.
"""
