"""What follows from a configuration, before anything runs.

`run_plan` has every derived number, and `resolve` derives them. The package `rules` has every check
of the configuration and of the plan.

Invariant: a plan is always complete, also if the configuration has errors.
"""
