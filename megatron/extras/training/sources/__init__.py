"""The kinds of data of --dataset-format. `kinds` has the table, and a new kind gets a row there."""
