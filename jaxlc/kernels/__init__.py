"""GPU kernels of our own, in Pallas: no mesh, no config."""
