"""Which experts a call brings into slots on the GPU, and their rows from pinned host memory."""
