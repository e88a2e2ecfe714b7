"""Reads shell scripts: their syntax, the values of their words, and their control flow."""
