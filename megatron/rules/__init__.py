"""Rules about the values of a configuration, and about what follows from them."""
