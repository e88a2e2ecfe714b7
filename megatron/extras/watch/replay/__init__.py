"""Compute a microbatch twice during training, and find the rank that computes other numbers."""
