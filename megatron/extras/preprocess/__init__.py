"""From text files to indexed data sets, and what belongs to that.

The package also merges and inspects data sets, and trains the vocabulary of a tokenizer.

Invariant: the bytes of the output are a function of the inputs and the tokenizer alone. They do not
depend on the number of workers, the encoding library, the size of blocks, or interruptions.
"""
