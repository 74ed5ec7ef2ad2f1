"""Arithmetic on shapes; imports torch only."""
