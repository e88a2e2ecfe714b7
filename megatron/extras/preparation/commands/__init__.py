"""Commands that prepare, merge and inspect data sets."""
