"""Backend `triton`: every scheme on any CUDA GPU from SM80 on."""
