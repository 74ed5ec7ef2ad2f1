"""Functions that kernels call."""
