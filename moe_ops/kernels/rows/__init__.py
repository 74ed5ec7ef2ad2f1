"""Kernels for the rows around products: move, quantize or round, activate, combine."""
