"""Sequences of a run: splits, packing, mixtures and loading."""
