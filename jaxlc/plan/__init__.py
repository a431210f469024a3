"""What a config will do on GPUs that are not here: the real step, compiled for them and read."""
