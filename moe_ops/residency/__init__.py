"""Experts larger than the GPU: all of a layer in host memory, some of them in slots on the GPU."""
