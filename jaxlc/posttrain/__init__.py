"""Rollouts during training: answers of the policy, and their rewards."""
