"""Backend `cutlass`: grouped GEMMs of csrc/cutlass between fused kernels of our own."""
