"""Verification of checkpoints (`verification`), and comparison of two of them (`comparison`)."""
