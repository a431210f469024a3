"""Checkpoints: writing, reading and checking them, and the weights that a run starts from."""
