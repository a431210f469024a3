"""Traces for post-training: prompts with several answers, packed as trees."""
