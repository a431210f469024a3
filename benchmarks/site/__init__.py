"""The pages of the documentation site, as Markdown for the site generator: `python -m
benchmarks.site`.
"""
