"""Ahead-of-time planning: compiles the training step for absent GPUs; reports memory, collectives,
estimated time.

`plan` compiles a step and returns a `Plan`; `Plan.from_json` reads a stored one.
"""

import functools
from collections.abc import Callable

from ml_collections import ConfigDict

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
from jaxlc.config import Config, RuntimeConfig
from jaxlc.core import checked
from jaxlc.plan.result import Plan, plan_step
from jaxlc.runtime.start import start
from jaxlc.simulate.roofline import from_file
from jaxlc.simulate.topology import topology as topology_of

__all__ = ["Plan", "plan"]


@checked
def plan(
    config: ConfigDict | Config,
    topology: str,
    *,
    devices_per_process: int = 1,
    host_memory_gib: float | None = None,
    advise: bool = False,
    constants: str = "",
    evaluation: bool = False,
    document_lengths: str = "",
    starting: Callable[[str], None] = lambda description: None,
) -> Plan:
    """Compiles the training step of `config` for GPUs such as "h100:8x8". No GPU is needed. Print the result.

    Args:
      config: a ConfigDict or Config.
      topology: target GPUs, "GPU:DOMAINSxGPUS_PER_DOMAIN".
      devices_per_process: GPUs per process.
      host_memory_gib: host memory of a node. None: a typical value for nodes with these GPUs.
      advise: if the step does not fit, also compile it with other settings, until some fit.
      constants: JSON file of measured constants for the estimates; see `jaxlc.simulate.roofline`.
      evaluation: also compile the evaluation of held-out sequences, for its peak memory.
      document_lengths: also estimate the step for packed sequences, since attention depends on their documents:
        "corpus" (the first sequences of config.data), "mix" (random: 60% of the tokens in documents of an eighth of
        the sequence or more), or the lengths of one sequence's documents in tokens, "65536,1024x64", in which
        "tree:8192+4x512" is a prefix that 4 documents continue.
      starting: called with a description of each program before it is compiled.
    Returns:
      A `Plan`: print it, show it in a notebook, or `save` it as an HTML page.
    Raises:
      UserError: invalid user input; see `result.plan_step`.
    """
    start(RuntimeConfig(num_processes=1))
    gpus = topology_of(
        topology, devices_per_process=devices_per_process, host_memory_gib=host_memory_gib
    )
    roofline = from_file(constants)
    starting_step = functools.partial(starting, f"the training step for {gpus}")
    result = plan_step(
        config,
        gpus,
        starting_step,
        roofline=roofline,
        evaluation=evaluation,
        document_lengths=document_lengths,
    )
    if advise and not result.memory.fits:
        from jaxlc.search.best_first import with_advice  # the search compiles plans

        return with_advice(result, config, gpus, starting, roofline)
    return result
