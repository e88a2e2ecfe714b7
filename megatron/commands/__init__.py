"""Console commands. `pyproject.toml` lists them, and the files under `tools/` call them."""
