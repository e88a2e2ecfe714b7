"""What watches a run, and what it reports.

What changes how a step is computed is in `extras.step`.
"""
