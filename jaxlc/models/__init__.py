"""The model: a Llama in Flax NNX, given its attention as an argument."""
