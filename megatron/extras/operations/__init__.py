"""Work of operators around a run: watching it, syncing it to the Hub, and rolling it back.

Nothing in this package trains a model.
"""
