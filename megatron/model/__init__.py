"""The network, as plain modules over [s, b, h] activations.

`gpt` is the model of a stage, `block` its layer, and `loss` its loss. `partition` divides layers
into stages. `execution` decides how blocks are computed. `init` has all weight initialisation, and
`flops` counts parameters and operations.

Invariant: the modules know tensor parallelism and their own stage, and nothing else of the cluster.
"""
