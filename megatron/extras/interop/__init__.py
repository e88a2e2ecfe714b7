"""Flags, files and checkpoints of other trainers and of Hugging Face, and what checkpoints hold."""
