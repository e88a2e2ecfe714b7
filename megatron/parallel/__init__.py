"""The rank grid and tensor parallelism, written here: it is what this project exists for."""
