"""Rows between the GPUs of a host, through each other's memory."""
