"""Ahead-of-time planning: compiles the training step for absent GPUs; reports memory, collectives, estimated time.

Imports nothing at first, so that `python -m jaxlc.plan` can prepare the environment before JAX starts.
"""


def plan(
    config,
    topology: str,
    *,
    devices_per_process: int = 1,
    host_memory_gib: float | None = None,
    advise: bool = False,
    constants: str = "",
    timeline: str = "",
    starting=lambda description: None,
):
    """Compiles the training step of `config` for GPUs such as "h100:8x8". No GPU is needed. Print the result.

    Args:
      config: a ConfigDict or Config.
      topology: target GPUs, "GPU:DOMAINSxGPUS_PER_DOMAIN".
      devices_per_process: GPUs per process.
      host_memory_gib: host memory of a node; None: what such nodes usually have.
      advise: if the step does not fit, compile it with other settings too, until some fit.
      constants: JSON file of measured constants for the estimates; see `jaxlc.simulate.roofline`.
      timeline: file for a plot of the estimated timeline of one layer.
      starting: called with a description of each program before it is compiled.
    Returns:
      A `report.Plan`.
    Raises:
      UserError: invalid user input; see `compile.plan_step`.
    """
    from jaxlc import runtime
    from jaxlc.config import RuntimeConfig

    runtime.start(RuntimeConfig())  # before anything imports jax
    from jaxlc.plan.advise import plan_with_advice
    from jaxlc.plan.compile import plan_step
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    host_bytes = None if host_memory_gib is None else int(host_memory_gib * 2**30)
    gpus = parse_topology(topology, devices_per_process=devices_per_process, host_memory_bytes_per_node=host_bytes)
    options = dict(roofline=from_file(constants), timeline_path=timeline)
    if advise:
        return plan_with_advice(config, gpus, starting, **options)
    return plan_step(config, gpus, lambda: starting(f"the training step for {gpus}"), **options)
