"""From text files to indexed data sets, and what belongs to that.

`inputs` reads files, `workers` and `encoders` tokenize blocks of texts, and `build_dataset` writes
the data set. `journal` and `resumable` continue after a kill. The package also merges and inspects
data sets (`merge`, `inspection`), and trains the vocabulary of a tokenizer (`bpe_training`).

Invariant: the bytes of the output are a function of the inputs and the tokenizer alone. They do not
depend on the number of workers, the encoding library, the size of blocks, or interruptions.
"""
