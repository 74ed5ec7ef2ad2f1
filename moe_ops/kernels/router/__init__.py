"""Fused routers."""
