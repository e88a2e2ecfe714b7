"""The configuration that a user asked for, as frozen dataclasses with one group in each file.

A field is declared once, and its docstring is its help. `cli` reads flat flags and nested YAML.
Rules about the fields are in `megatron.plan.rules`.
`normalise` has the interface of a translator of other trainers' flags.
"""
