"""Sorting (token, expert) pairs by expert."""
