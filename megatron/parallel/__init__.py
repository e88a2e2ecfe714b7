"""The rank grid, process groups and tensor parallelism.

This package does not use a library for tensor parallelism, because the implementation is the main
purpose of the project.
"""
