"""What follows from a configuration, before anything runs.

`run_plan` has every derived number, `resolve` derives them, and `record` sends a plan to other
ranks. The package `rules` has every check of the configuration and of the plan.

Invariant: a plan is always complete, also if the configuration has errors.
"""
