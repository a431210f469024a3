"""Tokenizers, chats, and the memory-mapped store of tokens."""
