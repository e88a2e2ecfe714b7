"""Verifies checkpoints, and compares two of them."""
