"""The training loop and what it needs: the state, resuming, evaluation and exits."""
