"""Evaluation of held-out sequences, and scores during training."""
