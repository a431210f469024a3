"""Pallas GPU kernels, without mesh or config."""
