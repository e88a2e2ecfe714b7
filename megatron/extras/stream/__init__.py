"""Training data that are read from Parquet, Arrow or JSONL files without a preparation step."""
