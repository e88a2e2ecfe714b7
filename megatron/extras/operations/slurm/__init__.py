"""Job arrays: what happens before, during and after one array task.

`array_task` is one task, `start` one start of the training in it, and `attempts` their record.
`node_probe` checks nodes, `exclusion` excludes hosts, and `client` calls Slurm's commands.
"""
