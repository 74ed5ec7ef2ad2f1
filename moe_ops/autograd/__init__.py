"""Gradients of expert layers."""
