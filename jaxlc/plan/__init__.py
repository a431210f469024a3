"""What a config will do on GPUs that are not here: the real step, compiled for them and read.

Imports nothing until asked, so that `python -m jaxlc.plan` can prepare the environment before JAX starts.
"""


def plan(config, topology: str, *, devices_per_process: int = 1, advise: bool = False):
    """Compiles the training step of `config` (a ConfigDict or Config) for GPUs such as "h100:8x8"; print the result.

    See `compile.plan`; with `advise`, a step that does not fit is compiled with other settings too, until some fit.
    """
    from jaxlc import runtime
    from jaxlc.config import RuntimeConfig
    from jaxlc.plan import advise as advice
    from jaxlc.plan import compile as compiling
    from jaxlc.plan.topology import topology as gpus_of

    runtime.start(RuntimeConfig())
    gpus = gpus_of(topology, devices_per_process=devices_per_process)
    return (advice.plan if advise else compiling.plan)(config, gpus)
