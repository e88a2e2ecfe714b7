"""Parts of a run: engines, kernels, kinds of data, and what a run does beside its steps."""
