"""Text generation from a checkpoint's model."""
