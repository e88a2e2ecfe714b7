"""Synchronisation of a run's records and checkpoints with the Hugging Face Hub."""
