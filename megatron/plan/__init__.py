"""What follows from a configuration, before anything runs.

`plan` has every derived number, `resolve` derives them, `rules` has the rules that need them, and
`record` sends a plan to other ranks.

Invariant: a plan is always complete. All errors of a configuration are collected in it.
"""
