"""Ranks meshes, strategies, remat policies and transports by the speed of the training step.

Command line: `python -m jaxlc.sweep`. From Python: `jaxlc.sweep.runner`.
"""
