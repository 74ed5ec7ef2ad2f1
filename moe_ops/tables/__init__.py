"""Measured times and configurations, and where they are kept."""
