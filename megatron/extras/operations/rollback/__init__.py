"""The rollback of a run to one of its checkpoints.

`plan` finds what must change, `cutting` removes later records, and `execution` does it in an order
that survives a kill.
"""
