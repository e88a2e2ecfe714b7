"""What computes a step: engines, kernels and formats of numbers.

What only looks at a step is in `extras.watch`.
"""
