"""The start of JAX: devices, processes, memory, XLA flags, compilation cache; and the watching of
processes.
"""
