"""The training loop and what it needs: the state, evaluation, exits and reports.

`pretrain` is everything that a rank does, and `loop` is the loop. `run` has what the loop uses,
`state` what every checkpoint stores, and `parts` the interfaces of the parts in `extras`. `exits`
has the reasons to stop. `leaving` ends the process after an error.

Invariant: every action of an iteration is visible in the loop.
"""
