"""Data path: indexed data sets, their sample order, mixtures, index caches and batches.

`source` has the interface that the loop uses, and that of a kind of data. `position_source` is the
base class of sources. `indexed_source` reads .bin and .idx files, in the
order that `gpt_dataset` and `order` give. `segments` keeps that order when a run
goes on with other data or sizes. `build_sources` builds the sources of a run. `cache` and
`building` store indices for other processes. `content` and `background` compute digests.

Invariant: a sample is a function of the state, the configuration and the rank's coordinate.
"""
