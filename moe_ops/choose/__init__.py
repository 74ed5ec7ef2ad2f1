"""Configs of an expert layer's kernels: measured ones, else those of the rules."""
