"""Backends `deep_gemm` and `deep_gemm_fp4`."""
