"""Checks of settings and of their combinations."""
