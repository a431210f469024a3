"""Reports on the data of a run."""
