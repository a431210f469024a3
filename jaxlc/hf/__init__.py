"""Weights of Hugging Face models: safetensors files, and between their tensors and our parameters."""
