"""Benchmark programs and generators of documentation tables. Run them from the repository root; see
README.md.
"""
