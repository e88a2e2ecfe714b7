"""What was asked: frozen dataclasses, one group a file, read from flat flags and nested YAML (`megatron.config.cli`)."""
