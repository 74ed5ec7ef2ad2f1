"""Grouped GEMMs of weights that are plain or quantized like their activations."""
