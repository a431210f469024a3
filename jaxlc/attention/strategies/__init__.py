"""Strategies of context parallelism: what the ranks of a sequence exchange."""
