"""Compares a trace of training steps with the estimate of the plan.

`compare` reads a trace that config.profile.steps or `jax.profiler` wrote.
"""

from pathlib import Path

import jaxlc.runtime.stderr  # noqa: F401  imports JAX without the notes of its CUDA plugin
from jaxlc.core import checked
from jaxlc.core.files import local_path
from jaxlc.profile import comparison, trace_events
from jaxlc.profile.comparison import Comparison

__all__ = ["compare"]


@checked
def compare(
    trace: str | Path,
    *,
    plan: str = "",
    topology: str = "",
    constants: str = "",
    num_steps: int = 0,
) -> Comparison:
    """Compares the time of a traced step with its estimate, by class: attention, matrix products, other kernels,
    exposed communication, exposed host copies and gaps. Print the result.

    Args:
      trace: WORKDIR/profile, a directory of `jax.profiler`, or a .xplane.pb file.
      plan: JSON file of `jaxlc plan --json`. "": the estimate is computed from the compiled step in WORKDIR/profile.
      topology: the GPUs of the run, such as "h100:1x8". "": config.runtime.topology, or the devices of the run.
      constants: JSON file of measured constants for the estimate; see `jaxlc.simulate.roofline`.
      num_steps: traced steps. 0: the number of step ranges in the trace.
    Raises:
      UserError: a file cannot be read, or the trace has no device events or no step ranges.
    """
    path = trace_events.find(local_path(trace))
    run = comparison.read_run(path)
    prediction = comparison.predict(run, plan=plan, topology_name=topology, constants=constants)
    return comparison.compare(trace_events.read(path), run, prediction, num_steps=num_steps)
