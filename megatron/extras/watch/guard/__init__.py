"""The spike guard: it finds bad steps, drops them, or rolls the run back.

`spike_estimator` has the limits, `spike_guard` the decisions, and `spike_response` the part of a
run that the loop calls, with the records, the rollbacks, and the data that are skipped after them.
"""
