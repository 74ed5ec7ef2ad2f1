"""Sorting tokens by expert and combining their results."""
