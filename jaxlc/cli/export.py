"""usage: jaxlc export WORKDIR OUT [--step=STEP] [--dtype=bf16] [--adapters] [--text_only]
       [--base=MODEL] [--push_to_hub=ORGANIZATION/NAME]

Writes the weights of a run as a Hugging Face directory, which transformers and other programs open.
Of a model with images, or with layers of multi-token prediction, it copies the parts that were not
trained from the model that the run started from.
It needs no accelerator, and host memory for the largest parameter, stacked over the layers.
"""

import functools
import os
from dataclasses import dataclass
from typing import Literal

import jaxlc
from jaxlc.config.command_line import ParsedCommand, VerbFlags, run_main
from jaxlc.config.models.config_json import is_own_format
from jaxlc.config.models.pretrained import CONFIG_FILE, read_json
from jaxlc.config.values import Above0


@dataclass(frozen=True, kw_only=True)
class Flags(VerbFlags):
    positional = ("workdir", "out")

    workdir: str  # workdir of the run
    out: str  # directory to write, which must not exist or be empty
    step: int | None = None  # checkpoint to export; default: the latest
    dtype: Literal["bf16", "fp32"] = "bf16"  # data type of the weights, bf16 or fp32
    max_shard_gb: Above0[float] = 5.0  # size limit of a file in GB
    # write the adapters of LoRA alone, for peft, in float32, instead of merging them
    adapters: bool = False
    # write the language model alone, without the parts that were not trained
    text_only: bool = False
    # a run with NF4: merge into the weights of this model, a directory or hub id, instead of the dequantized ones
    base: str = ""
    # upload the export to this model of the Hugging Face hub, with a model card
    push_to_hub: str = ""
    public: bool = False  # push_to_hub: a new model is public, instead of private


def _export(command: ParsedCommand[Flags]) -> int:
    os.environ["JAX_PLATFORMS"] = "cpu"
    target = jaxlc.export(**vars(command.flags))
    print(f"wrote {target}")
    if command.flags.push_to_hub:
        print(f"uploaded to {command.flags.push_to_hub}")
    if not command.flags.adapters and is_own_format(read_json(target / CONFIG_FILE)):
        print(
            "model_type jaxlc: no family of transformers has its layers; jaxlc reads it (config.model.init_from)"
        )
    return 0


# (argv, program name first) -> exit status
main = functools.partial(
    run_main,
    _export,
    description=__doc__,
    flags=Flags,
    interrupted="interrupted; nothing was written",
)
