"""Attention for layers that run in tiles of queries."""
