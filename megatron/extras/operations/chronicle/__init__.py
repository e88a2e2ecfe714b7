"""The report of a run: what its files say about it, as text and as a page."""
