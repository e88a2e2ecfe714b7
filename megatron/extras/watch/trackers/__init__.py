"""Experiment trackers, fed by a process that reads the metrics file, and the meter of emissions.

`process` is the side of the training, and `feed` that of the other process, with a class for each
tracker. `emissions` measures energy and CO2.
"""
