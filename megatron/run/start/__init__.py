"""The start of a run: the ranks meet, compare their command lines, and build a `Run`."""
