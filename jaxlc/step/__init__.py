"""The training step: what is compiled, from the loss to the update of the state."""
