"""Commands that use a trained model: `evaluate` and `generate`."""
