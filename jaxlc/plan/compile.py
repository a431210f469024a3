"""Compiles the very step that training runs, for GPUs that are not here, and reads it."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from jax.stages import Compiled, Lowered
from jaxlib.mlir import ir
from ml_collections import ConfigDict

from jaxlc._jax_internals import kept_argument_indices
from jaxlc.config import Config, load
from jaxlc.config.mesh_checks import mesh_overrides, working_mesh
from jaxlc.core import extras
from jaxlc.core.errors import UserError
from jaxlc.hlo import parse
from jaxlc.hlo.attention_hops import hops
from jaxlc.hlo.collectives import collectives
from jaxlc.hlo.memory_dump import Dump, read
from jaxlc.plan import memory, summary
from jaxlc.plan.report import Plan
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.timeline import DEFAULT_RATES, predict
from jaxlc.simulate.topology import Topology, make_mesh, options_without_gpu
from jaxlc.train import verify_compiled
from jaxlc.train.state import HOST, PINNED_HOST
from jaxlc.train.step import TrainStep, build_step

_KIND, _ALIAS = "mhlo.memory_kind", "tf.aliasing_output"  # attributes of the lowered program's arguments and results


def plan_step(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[], None],
    rates: Roofline = DEFAULT_RATES,
    timeline_path: str = "",
) -> Plan:
    """Compiles the training step of `config` for `gpus` and reads from it what a run will do.

    What config.runtime says about devices and processes here counts for nothing.

    Args:
      starting: called when everything is checked and the compiler starts.
      rates: for the predicted time.
      timeline_path: where a picture of one layer's predicted time is written; empty: nowhere.
    Raises:
      UserError: whatever the user can mend: a mesh of another size, a kernel or transport that cannot be used, or
        is not what the compiler took, arrays too large.
    """
    if timeline_path:
        extras.require("matplotlib", "the picture of the timeline")
    config = on_gpus(config, gpus)
    step = build_step(config, make_mesh(gpus, config.mesh))
    kernel, hops_by = step.kernel, step.transport  # what cannot be is told before the compiler starts
    starting()
    start_seconds = time.perf_counter()
    compiled, dump = compile_step(step)
    seconds = time.perf_counter() - start_seconds
    program = parse(compiled.as_text())
    sent, found = collectives(program), hops(program)
    warnings = verify_compiled.check(step, found)
    verify_compiled.check_memory(step, program)
    if timeline_path:
        from jaxlc.simulate import timeline_plot  # imported here because matplotlib is slow to import

        timeline_plot.plot_layer(program, gpus, config, Path(timeline_path), rates)
    return Plan(
        topology=str(gpus),
        num_devices=gpus.num_gpus,
        mesh=dict(step.mesh.shape),
        sequence_tokens=config.data.seq_len,
        tokens_per_step=config.tokens_per_step,
        compile_seconds=seconds,
        predicted=predict(program, gpus, config, rates),
        memory=memory.measure(step, gpus, compiled, program, sent, dump),
        collectives=summary.traffic(sent, dict(step.mesh.shape), gpus.gpus_per_domain),
        ring=summary.ring(found, gpus),
        kernels=summary.kernels(program),
        kernel_choice=f"{kernel.name} ({kernel.reason})",
        transport_choice="; ".join([f"{hops_by.name} ({hops_by.reason})", *warnings]),
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


def compile_step(step: TrainStep) -> tuple[Compiled, Dump]:
    """The step's executable, and what the compiler wrote down about it.

    Raises:
      UserError: its arrays are too large for the compiler, or for the host's memory.
    """
    with tempfile.TemporaryDirectory() as directory:
        try:
            options = options_without_gpu(step.config.precision.compute)
            lowered = step.lower()
            place_state(step, lowered)
            compiled = step.compile(extra_options={**options, "xla_dump_to": directory}, lowered=lowered)
        except (jax.errors.JaxRuntimeError, OverflowError, MemoryError) as error:
            first_line = str(error).partition("\n")[0]
            raise UserError(
                f"a step of config.data.seq_len={step.config.data.seq_len} cannot be compiled:"
                f" {first_line}; use fewer, or split them over a larger config.mesh.context"
            ) from error
        return compiled, read(Path(directory))


def place_state(step: TrainStep, lowered: Lowered) -> None:
    """Tells the lowered `step` which arrays of the state rest in host memory: its devices need not be here."""
    kinds = [PINNED_HOST if space is HOST else None for space in jax.tree.leaves(step.memory_spaces)]
    if any(kinds):
        others = [None] * len(step.abstract_batch)
        place_in_memory(lowered, kinds + others, kinds + [None] * (lowered.out_tree.num_leaves - len(kinds)))


def place_in_memory(lowered: Lowered, arguments: Sequence[str | None], results: Sequence[str | None]) -> None:
    """Writes memory kinds into a lowered program, before `.compile()`, since JAX drops those of GPUs that are not here.

    Such devices list no memories, so that a sharding with memory_kind="pinned_host" leaves no trace, and the bytes
    would count as the GPU's. An argument that is given up to a result in another memory is so no more. Not for a
    function that was compiled before: JAX keeps its executable, and does not see that the program has changed.

    Args:
      arguments, results: for each leaf "pinned_host" or "device", or None, which leaves it as it is.
    """
    kept = kept_argument_indices(lowered)
    module = lowered.compiler_ir("stablehlo")
    (main,) = (each for each in module.body.operations if _is_main(each))
    with module.context:
        result_attributes = [
            _with_kind(each, kind) for each, kind in zip(main.attributes["res_attrs"], results, strict=True)
        ]
        argument_attributes = [
            _with_kind(each, arguments[index]) for each, index in zip(main.attributes["arg_attrs"], kept, strict=True)
        ]
        for each in argument_attributes:
            aliased_output = each.get(_ALIAS)
            if aliased_output is not None and _kind(each) != _kind(
                result_attributes[ir.IntegerAttr(aliased_output).value]
            ):
                del each[_ALIAS]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in argument_attributes])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in result_attributes])


def _is_main(operation) -> bool:
    return "sym_name" in operation.attributes and ir.StringAttr(operation.attributes["sym_name"]).value == "main"


def _with_kind(attributes, kind: str | None) -> dict:
    named = {each.name: each.attr for each in ir.DictAttr(attributes)}
    return named | ({_KIND: ir.StringAttr.get(kind)} if kind else {})


def _kind(named: dict) -> str:
    return ir.StringAttr(named[_KIND]).value if _KIND in named else "device"
