"""Predicted memory and time of a run, the search of layouts, and dry runs."""
