"""Memory and time of a training step, predicted from shapes alone.

Every function is pure. Nothing here imports torch, starts a process or looks at a device.
docs/planner_errors.md compares the predictions with published measurements.

`step_prediction` predicts the time of a step from `kernels`, `layers`, `pipeline_simulation` and
`communication`. `peak` predicts its memory from `tensors`, and `float8` what is rounded. `experts`
and `delta_net` have the times and tensors of other layers. `search` compares layouts. `hardware`
reads files of devices.
"""
