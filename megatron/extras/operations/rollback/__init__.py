"""The rollback of a run to one of its checkpoints.

`rollback_plan` finds what must change, `cutting` removes later records, and `execution` does it in
an order that survives a kill.
"""
