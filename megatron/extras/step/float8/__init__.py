"""Linear layers whose products are computed in float8, with scales of complete tensors.

`engine` gives the layers their products before each step. `products` has the products of a layer,
and the messages that make scales equal on all ranks. `weight_scales` has the scales of weights,
once a step. `rounding` converts and multiplies matrices. `rounding_kernel` has its kernels for
GPUs. `recipe` says which layers are in float8. `operand_shares` has what the guard measures.
"""
