"""Data path: indexed data sets, their sample order, mixtures, index caches and batches."""
