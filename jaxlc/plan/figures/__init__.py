"""Figures and the HTML page of a plan."""
