"""Work of operators around a run. Nothing in this package trains a model.

`slurm` runs array tasks and checks nodes. `monitor` watches a run and raises alerts. `chronicle`
reports what happened. `rollback` takes a run back to a checkpoint. `hub` syncs it to the Hugging
Face Hub.
"""
