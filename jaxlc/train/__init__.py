"""Training: `run(config)` trains; `step.build_step` builds the training step that plan, sweep and benchmarks use too.

JAX is imported only when `run` is called, so that `python -m jaxlc.train` can set the environment before.
"""


def run(config, workdir: str = "runs/notebook"):
    """Trains `config` (a ConfigDict or Config) in `workdir`, or resumes a run there; see `loop.run`."""
    from jaxlc.train import loop

    return loop.run(config, workdir)
