"""Export of a run as a Hugging Face directory: `jaxlc.export` and the command `jaxlc export`."""
