"""Conversion of models and runs from and to other formats.

`architectures` has a table for each architecture of Hugging Face. `export`, `importing` and
`compare` read the same table, through `fields` and `tensors`. `hf_export` exports while a run
trains. `from_megatron` and `from_trainer` open checkpoints of other trainers. `unpickle` reads
their pickles without running code. `tokenizer_files` converts tokenizers.

Invariant: a folder gets its final name only after the comparison.
"""
