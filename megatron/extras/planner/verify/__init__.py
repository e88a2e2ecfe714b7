"""A reduced copy of a run, compared with one process.

`verification` is the whole of it. `reduction` makes the copy, `reference` is the one process, and
`comparison` finds the differences, and names the first tensor that differs.
"""
