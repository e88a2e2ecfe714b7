"""The loop and what it needs: the state, resuming, evaluation, exits."""
