"""usage: jaxlc init --config=RECIPE --model=MODEL --data=PATHS --topology=GPU:DOMAINSxGPUS
[--config.SECTION.KEY=VALUE ...]

Writes a config file for a model, data and GPUs, with a comment on each setting: the settings of the recipe, and mesh,
attention strategy, microbatches and memory as `jaxlc recommend` finds them. Without --config, it is a config to
train on texts.

    jaxlc init --config=sft_128k --model=Qwen/Qwen3-8B --data=chats.jsonl --topology=h100:1x8
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxlc.cli import recommend
from jaxlc.config import MeshConfig
from jaxlc.config.command_line import run_main
from jaxlc.config.files import base_config
from jaxlc.config.schema import AttentionConfig, MemoryConfig
from jaxlc.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Flags(recommend.Flags):
    model: str | None = None  # a preset, a Hugging Face directory or hub id; also with --config
    # files, directories or glob patterns, separated by commas; of traces or prompts for a recipe that trains on these
    data: str = ""
    out: str = "my_config.py"  # config file to write


def main(argv: Sequence[str]) -> int:
    """Runs the command line `argv`, program name first; returns its status, as `jaxlc recommend`."""
    command = functools.partial(recommend.recommend_stages, verb="init")
    kept = "interrupted; compiled steps are kept, and the same command resumes"
    return run_main(command, argv, description=__doc__, flags=Flags, base=_config, interrupted=kept)


def _config(config: ConfigDict | None, flags: Mapping[str, Any]) -> ConfigDict | None:
    """The recipe with the model and the data of the flags, and the defaults of what the search chooses.

    Raises:
      UserError: there is neither a recipe nor a model, or the recipe has several sources.
    """
    config = base_config(config, flags)
    if config is None:
        raise UserError("no model is given: use --model=NAME, or --config=RECIPE")
    config.mesh.update(vars(MeshConfig()))
    config.memory.update(vars(MemoryConfig()))
    defaults = AttentionConfig()
    config.attention.update(strategy=defaults.strategy, ulysses_degree=defaults.ulysses_degree)
    if paths := tuple(filter(None, flags["data"].split(","))):
        _set_data(config, paths)
    return config


def _set_data(config: ConfigDict, paths: tuple[str, ...]) -> None:
    data, sources = config.data, [*config.data.mixture]
    if config.rollouts.source == "model":
        config.rollouts.prompts = paths
    elif data.traces or config.posttrain.loss:
        data.update(sources=(), traces=paths)
    elif len(sources) > 1:
        names = " ".join(f"--config.data.mixture.{name}.paths=PATHS" for name in sources)
        raise UserError(f"unsupported: --data for a recipe with several sources; use {names}")
    elif sources:
        data.mixture[sources[0]].paths = paths
    else:
        data.sources = paths
