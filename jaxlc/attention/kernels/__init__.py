"""Attention kernels with one contract, and their selection."""
