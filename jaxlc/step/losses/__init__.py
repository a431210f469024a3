"""The losses of a step: cross entropy in chunks, policies and preferences, and the balance of experts."""
