"""The model: a decoder in Flax NNX, given its attention as an argument."""
