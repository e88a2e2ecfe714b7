"""What `megatron-plan` prints, and the command that calibrates it."""
