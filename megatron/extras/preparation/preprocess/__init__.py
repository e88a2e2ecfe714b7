"""From text files to indexed data sets, and what belongs to that.

`inputs` reads files, `workers` and `encoders` tokenize blocks of texts, and `build_dataset` writes
the data set. `journal` continues after a kill. The package also inspects data sets (`inspection`,
`row_inspection`).

Invariant: the bytes of the output are a function of the inputs and the tokenizer alone. They do not
depend on the number of workers, the encoding library, the size of blocks, or interruptions.
"""
