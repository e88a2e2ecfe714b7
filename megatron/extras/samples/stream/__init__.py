"""Training data that are read from Parquet, Arrow or JSONL files without a preparation step.

`build` builds the sources from the flags. `source` has the samples of a batch, `reader` those of a
logical shard, `streamed_dataset` the documents, and `shard_order` their order. `filters` leaves
documents out. `formats` has the file formats, `table_files` opens Parquet and Arrow, and `remote`
reads files at URLs.
"""
