"""The rollback of a run to one of its checkpoints."""
