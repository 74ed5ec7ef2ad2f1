"""Kernels around the grouped products of a training step."""
