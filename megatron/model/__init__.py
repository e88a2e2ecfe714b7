"""The network, as plain modules over [s, b, h] activations.

The modules know tensor parallelism and nothing else of the cluster.
"""
