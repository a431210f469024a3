"""Compiles the very step that training runs, for GPUs that are not here, and reads it."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered
from jaxlib.mlir import ir
from ml_collections import ConfigDict

from jaxlc.config import Config, load
from jaxlc.config.checks import mesh_overrides, working_mesh
from jaxlc.core.errors import UserError
from jaxlc.plan import contents, memory
from jaxlc.plan.dump import Dump, read
from jaxlc.plan.report import Plan
from jaxlc.plan.topology import WITHOUT_GPU, Topology, make_mesh
from jaxlc.program import parse
from jaxlc.program.collectives import collectives
from jaxlc.program.ring import hops
from jaxlc.train.step import TrainStep, build_step

PINNED_HOST = "pinned_host"


def plan(config: ConfigDict | Config, gpus: Topology) -> Plan:
    """Compiles the training step of `config` for `gpus` and reads from it what a run will do.

    What config.runtime says about devices and processes here counts for nothing.

    Raises:
      UserError: whatever the user can mend: a mesh of another size, a transport that is not there, arrays too large.
    """
    config = on_gpus(config, gpus)
    start_seconds = time.perf_counter()
    step, compiled, dump = compile_step(config, gpus)
    seconds = time.perf_counter() - start_seconds
    program = parse(compiled.as_text())
    sent = collectives(program)
    return Plan(
        topology=str(gpus),
        num_devices=gpus.num_gpus,
        mesh=dict(step.mesh.shape),
        sequence_tokens=config.data.sequence_tokens,
        tokens_per_step=config.data.sequence_tokens * config.train.rows_per_step,
        compile_seconds=seconds,
        memory=memory.measure(step, gpus, compiled.memory_analysis(), program, sent, dump),
        collectives=contents.traffic(sent, dict(step.mesh.shape), gpus.gpus_per_domain),
        ring=contents.ring(hops(program), gpus),
        kernels=contents.kernels(program),
        kernel=f"{step.kernel.name} ({step.kernel.reason})",
        transport=f"{step.transport.name} ({step.transport.reason})",
    )


def on_gpus(config: ConfigDict | Config, gpus: Topology) -> Config:
    """The config as it is checked on `gpus`: whatever simulates devices or names processes is left out.

    Raises:
      UserError: the mesh is not of so many devices; names overrides that are.
    """
    config = load(config)
    config = dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, simulated_devices=0, num_processes=1, process_id=0)
    )
    if config.mesh.num_devices == gpus.num_gpus:
        return config
    axes = " x ".join(f"{axis}={size}" for axis, size in vars(config.mesh).items())
    sentence = f"the mesh {axes} needs {config.mesh.num_devices} GPUs and {gpus} has {gpus.num_gpus}"
    mesh = working_mesh(config, gpus.num_gpus)
    advice = f"use {mesh_overrides(config.mesh, mesh)}, or" if mesh else "no mesh of its size splits this model; use"
    raise UserError(f"{sentence}; {advice} another --topology, of {config.mesh.num_devices} GPUs")


def compile_step(config: Config, gpus: Topology) -> tuple[TrainStep, Compiled, Dump]:
    """The step, its executable, and what the compiler wrote down about it.

    Raises:
      UserError: the compiler refuses the program, or a kernel that is named cannot do what the config asks.
    """
    step = build_step(config, make_mesh(gpus, config.mesh))
    with tempfile.TemporaryDirectory() as directory:
        try:
            compiled = step.compile(extra_options={**WITHOUT_GPU, "xla_dump_to": directory})
        except NotImplementedError as error:
            raise UserError(str(error)) from error
        except (jax.errors.JaxRuntimeError, OverflowError) as error:
            first_line = str(error).partition("\n")[0]
            raise UserError(
                f"this step cannot be compiled for {gpus}: {first_line}; try fewer config.data.sequence_tokens, or"
                " split them over a larger config.mesh.context"
            ) from error
        return step, compiled, read(Path(directory))


def place_in_memory(lowered: Lowered, arguments: Sequence[str | None], results: Sequence[str | None]) -> None:
    """Writes memory kinds into a lowered program, before `.compile()`, since JAX drops those of GPUs that are not here.

    Such devices list no memories, so that a sharding with memory_kind="pinned_host" leaves no trace, and the bytes
    would count as the GPU's. An argument that was to be given up to a result in another memory is kept.

    Args:
      arguments, results: for each leaf "pinned_host" or "device", or None, which leaves it as it is.
    """
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])  # what the program does not use is not in it
    module = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if _text(op, "sym_name") == "main")
    result_kinds = [kind or _text(attributes, "mhlo.memory_kind") for kind, attributes in
                    zip(results, main.attributes["res_attrs"], strict=True)]  # fmt: skip
    with module.context:
        main.attributes["res_attrs"] = _with_kinds(main.attributes["res_attrs"], result_kinds, ())
        kinds = [arguments[index] for index in kept]
        main.attributes["arg_attrs"] = _with_kinds(main.attributes["arg_attrs"], kinds, result_kinds)
