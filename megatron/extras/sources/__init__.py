"""The kinds of data of --dataset-format, and those that are small enough for one file."""
