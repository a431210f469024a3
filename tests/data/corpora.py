"""A small corpus that several tests open."""

import dataclasses
from pathlib import Path

from jaxlc.config.schema import DataConfig

S = 24  # sequence length


def make_config(directory: Path, **changes) -> DataConfig:
    """40 documents of one line each."""
    if not (directory / "docs").exists():
        (directory / "docs").mkdir()
        for i in range(40):
            (directory / "docs" / f"{i}.txt").write_text(f"document {i} " * (i % 7 + 1))
    config = DataConfig(
        sources=(str(directory / "docs"),),
        cache_dir=str(directory / "cache"),
        seq_len=S,
        eval_fraction=0.25,
    )
    return dataclasses.replace(config, **changes)
