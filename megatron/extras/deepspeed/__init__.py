"""The engine that trains with DeepSpeed."""
