"""The network: plain modules over [s, b, h] activations that know tensor parallelism and nothing else of the cluster."""
