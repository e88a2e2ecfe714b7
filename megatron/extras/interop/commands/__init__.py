"""Commands that convert and inspect checkpoints."""
