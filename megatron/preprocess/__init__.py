"""From text files to indexed data sets, and what belongs to that: merging, inspecting, training a tokenizer's vocabulary.

Invariant: the bytes that come out are a function of the inputs and the tokenizer alone; the number of workers, the library that
encodes, the size of the blocks, and kills with resumptions in between do not show in them.
"""
