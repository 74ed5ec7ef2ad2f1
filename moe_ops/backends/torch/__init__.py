"""Backend `torch`."""
