"""The configuration that a user asked for, as frozen dataclasses with one group in each file.

`megatron.config.cli` reads it from flat flags and nested YAML.
"""
