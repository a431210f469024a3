"""Searches of settings: sweeps, recommendations, and advice for a step that does not fit."""
