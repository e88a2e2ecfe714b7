"""The kinds of data of --dataset-format."""
