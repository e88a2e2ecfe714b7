"""One engine step of one rank on fake CUDA tensors, without a GPU.

`process` starts a dry run, `fake_rank` runs the step, `fake_gpu` has the operators, and `record`
counts what they do. A fake tensor has a shape, a dtype and a device, but no values.
`docs/dry_run.md` states what a step on fake tensors shows and what it cannot show.
"""
