"""Training: `run(config)` trains; `step.build_step` is the one training step that everything else reuses.

Imports nothing until asked, so that `python -m jaxlc.train` can prepare the environment before JAX starts.
"""


def run(config, workdir: str = "runs/notebook"):
    """Trains `config` (a ConfigDict or Config) in `workdir`, resuming what is there; see `loop.run`."""
    from jaxlc.train import loop

    return loop.run(config, workdir)
