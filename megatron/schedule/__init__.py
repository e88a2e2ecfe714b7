"""Schedules as functions of progress, and the order of a step's microbatches.

`batch_size`, `lr`, `curriculum`, `skip` and `clock` each have one schedule. `position` forecasts a
run. `pipeline_schedule` chooses the pipeline schedule and computes its idle time.
Nothing here imports torch or the configuration.
"""
