"""The result of a run, also of one that is loaded."""
