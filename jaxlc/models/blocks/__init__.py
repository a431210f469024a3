"""The blocks of layers: attention, linear attention, feed-forward and experts."""
