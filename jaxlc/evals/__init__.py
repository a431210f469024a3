"""Evaluations of long contexts: RULER, needles in a haystack, and generation by a model on its
mesh.

task -> examples of an exact length -> generation -> predictions on disk -> scores and pictures
"""
