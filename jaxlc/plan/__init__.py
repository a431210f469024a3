"""What a config will do on GPUs that are not here: the real step, compiled for them and read.

Imports nothing until asked, so that `python -m jaxlc.plan` can prepare the environment before JAX starts.
"""


def plan(
    config,
    topology: str,
    *,
    devices_per_process: int = 1,
    advise: bool = False,
    constants: str = "",
    timeline: str = "",
    starting=lambda what: None,
):
    """Compiles the training step of `config` (a ConfigDict or Config) for GPUs such as "h100:8x8"; print the result.

    See `compile.plan_step`. With `advise`, a step that does not fit is compiled with other settings too, until some
    fit. `constants` names a file of measured rates for the predicted time (`jaxlc.simulate.roofline`), `timeline`
    one to be written with a picture of it. `starting` is told what is compiled next.
    """
    from jaxlc import runtime
    from jaxlc.config import RuntimeConfig

    runtime.start(RuntimeConfig())  # before anything imports jax
    from jaxlc.plan.advise import plan_with_advice
    from jaxlc.plan.compile import plan_step
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as gpus_of

    gpus = gpus_of(topology, devices_per_process=devices_per_process)
    options = dict(rates=from_file(constants), timeline_path=timeline)
    if advise:
        return plan_with_advice(config, gpus, starting, **options)
    return plan_step(config, gpus, lambda: starting(f"the training step for {gpus}"), **options)
