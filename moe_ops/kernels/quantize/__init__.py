"""Quantizing activations."""
