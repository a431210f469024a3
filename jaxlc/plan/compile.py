"""Compiles the training step ahead of time for absent GPUs, and analyzes the compiled program."""

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
from jaxlc.config import Config, load, to_dict
from jaxlc.config.checks.mesh_checks import mesh_overrides, working_mesh
from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.hlo import analyze
from jaxlc.hlo.memory_dump import Dump, read
from jaxlc.plan import memory, summary
from jaxlc.plan.packing_estimates import estimate_packing, read_documents
from jaxlc.plan.result import Plan
from jaxlc.simulate.layer_timeline import layer_timeline
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE, TimeModel
from jaxlc.simulate.timeline import predict
from jaxlc.simulate.topology import Topology, make_mesh, options_without_gpu
from jaxlc.step import verify_compiled
from jaxlc.step.state import HOST, PINNED_HOST
from jaxlc.step.step import TrainStep, build_step

# Of the config, in the plan and its JSON: the sections that shape the step, without paths of files.
_RECORDED_SECTIONS = ("model", "lora", "mesh", "attention", "memory", "precision", "train")
_KIND, _ALIAS = "mhlo.memory_kind", "tf.aliasing_output"  # attributes of the lowered program's arguments and results


def plan_step(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[], None],
    roofline: Roofline = DEFAULT_ROOFLINE,
    evaluation: bool = False,
    document_lengths: str = "",
) -> Plan:
    """Compiles the training step of `config` ahead of time for `gpus`, analyzes the program and summarizes it.

    Settings of config.runtime that concern this machine (simulated devices, processes) are ignored.

    Args:
      starting: called after all checks, when the compiler starts.
      evaluation: also compile the evaluation of held-out sequences, for its peak memory.
      roofline: for all estimated times: the step, and which ring steps attention hides.
      document_lengths: also estimate the step for packed sequences; see `packing_estimates.read_documents`.
    Raises:
      UserError: invalid user input: a mesh of another size, an unsupported kernel or transport, a transport that the
        compiler did not use, arrays too large for the compiler.
    """
    config = on_gpus(config, gpus)
    step = build_step(config, make_mesh(gpus, config.mesh))
    documents = read_documents(config, document_lengths) if document_lengths else None
    kernel_choice, transport = step.kernel_choice, step.transport  # unsupported choices are reported before compilation
    starting()
    start_seconds = time.perf_counter()
    compiled, dump = compile_step(step)
    seconds = time.perf_counter() - start_seconds
    program = analyze(compiled.as_text(), dump.thunks)
    warnings = verify_compiled.check(step, program.attention_collectives)
    verify_compiled.check_memory(step, program)
    verify_compiled.check_host_copies(program)
    model = TimeModel(gpus, config, roofline)
    step_memory = memory.measure(step, gpus, compiled, program, dump)
    return Plan(
        topology=str(gpus),
        num_devices=gpus.num_gpus,
        mesh=dict(step.mesh.shape),
        sequence_tokens=config.data.seq_len,
        tokens_per_step=config.tokens_per_step,
        compile_seconds=seconds,
        predicted=predict(program, model),
        memory=step_memory,
        collectives=summary.collective_stats(program.collectives, dict(step.mesh.shape), gpus.gpus_per_domain),
        ring=summary.ring(program.attention_collectives, model),
        kernels=summary.kernels(program),
        kernel_choice=kernel_choice,
        transport_choice="; ".join([f"{transport.name} ({transport.reason})", *warnings]),
        hints=hints(step),
        config={section: values for section, values in to_dict(config).items() if section in _RECORDED_SECTIONS},
        layer_timeline=layer_timeline(program, model),
        evaluation_peak_bytes=_evaluation_peak_bytes(step, step_memory) if evaluation else None,
        packing=documents and estimate_packing(documents, step, program, model),
    )


def on_gpus(config: ConfigDict | Config, gpus: Topology) -> Config:
    """The config as it is checked for `gpus`, without simulated devices and process numbers.

    Raises:
      UserError: the mesh has a different number of devices; the message names overrides that fit.
    """
    config = load(config)
    config = dataclasses.replace(
        config, runtime=dataclasses.replace(config.runtime, simulated_devices=0, num_processes=1, process_id=0)
    )
    if config.mesh.num_devices == gpus.num_gpus:
        return config
    problem = (
        f"the mesh {mesh_text(vars(config.mesh))} needs {config.mesh.num_devices} GPUs and {gpus} has {gpus.num_gpus}"
    )
    mesh = working_mesh(config, gpus.num_gpus)
    advice = f"use {mesh_overrides(config.mesh, mesh)}, or" if mesh else "no mesh of its size splits this model; use"
    raise UserError(f"{problem}; {advice} another --topology, of {config.mesh.num_devices} GPUs")


def hints(step: TrainStep) -> tuple[str, ...]:
    """Settings that may make the step faster, as sentences."""
    attention = step.config.attention
    if not attention.document_mask or "cudnn" in step.kernel_names:
        return ()
    unmasked = dataclasses.replace(step.config, attention=dataclasses.replace(attention, document_mask=False))
    if "cudnn" not in build_step(unmasked, step.mesh).kernel_names:
        return ()
    return (
        "--config.attention.document_mask=False allows the cuDNN attention kernel, which is faster than"
        f" {step.kernel_names}; tokens then attend to earlier documents of their sequence",
    )


def _evaluation_peak_bytes(step: TrainStep, step_memory: memory.Memory) -> int:
    compiled, dump = compile_evaluation(step)
    program = analyze(compiled.as_text(), dump.thunks)
    verify_compiled.check(step, program.attention_collectives)
    verify_compiled.check_host_copies(program)
    return memory.evaluation_peak_bytes(step, step_memory, compiled, program, dump)


def compile_step(step: TrainStep) -> tuple[Compiled, Dump]:
    """The executable of the step, and the compiler's memory reports.

    Raises:
      UserError: arrays too large for the compiler, or not enough memory on this machine.
    """

    def compiled(options) -> Compiled:
        lowered = step.lower()
        place_state(step, lowered)
        return step.compile(extra_options=options, lowered=lowered)

    return _with_dump(step, compiled)


def compile_evaluation(step: TrainStep) -> tuple[Compiled, Dump]:
    """As `compile_step`, of the evaluation of one microbatch (`TrainStep.jitted_evaluation`)."""

    def compiled(options) -> Compiled:
        lowered = step.lower_evaluation()
        spaces = jax.tree.leaves(step.memory_spaces.params)
        kinds = [PINNED_HOST if space is HOST else None for space in spaces]
        place_in_memory(lowered, kinds + [None] * len(step.abstract_evaluation_batch), [None])
        return step.compile_evaluation(extra_options=options, lowered=lowered)

    return _with_dump(step, compiled)


def _with_dump(step: TrainStep, compile_with: Callable[[dict], Compiled]) -> tuple[Compiled, Dump]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            options = options_without_gpu(step.config.precision.compute)
            compiled = compile_with({**options, "xla_dump_to": directory})
        except (jax.errors.JaxRuntimeError, OverflowError, MemoryError) as error:
            first_line = str(error).partition("\n")[0]
            advice = "use a shorter sequence or a larger config.mesh.context"
            if first_line.startswith("INTERNAL"):
                advice = f"this is a defect of the compiler of JAX {jax.__version__}: use another version"
            raise UserError(
                f"compilation failed with config.data.seq_len={step.config.data.seq_len}: {first_line}; {advice}"
            ) from error
        return compiled, read(Path(directory))


def place_state(step: TrainStep, lowered: Lowered) -> None:
    """Writes into the lowered `step` which arrays of the state are in host memory; its devices may be absent."""
    kinds = [PINNED_HOST if space is HOST else None for space in jax.tree.leaves(step.memory_spaces)]
    if any(kinds):
        others = [None] * len(step.abstract_batch)
        place_in_memory(lowered, kinds + others, kinds + [None] * (lowered.out_tree.num_leaves - len(kinds)))


def place_in_memory(lowered: Lowered, arguments: Sequence[str | None], results: Sequence[str | None]) -> None:
    """Writes memory kinds into a lowered program, before `.compile()`, because JAX drops those of absent GPUs.

    Absent devices list no memories, so a sharding with memory_kind="pinned_host" has no effect, and the bytes would
    count as device memory. Donation of an argument to a result in another memory is removed. The function must not
    have been compiled before: JAX caches its executable, and does not notice that the program has changed.

    Args:
      arguments, results: for each leaf "pinned_host" or "device", or None to keep it as it is.
    """
    kept = kept_argument_indices(lowered)
    module = lowered.compiler_ir("stablehlo")
    (main,) = (operation for operation in module.body.operations if _is_main(operation))
    with module.context:
        result_attributes = [
            _with_kind(attributes, kind) for attributes, kind in zip(main.attributes["res_attrs"], results, strict=True)
        ]
        argument_attributes = [
            _with_kind(attributes, arguments[index])
            for attributes, index in zip(main.attributes["arg_attrs"], kept, strict=True)
        ]
        for named in argument_attributes:
            aliased_output = named.get(_ALIAS)
            if aliased_output is not None and _kind(named) != _kind(
                result_attributes[ir.IntegerAttr(aliased_output).value]
            ):
                del named[_ALIAS]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(named) for named in argument_attributes])
        main.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(named) for named in result_attributes])


def _is_main(operation) -> bool:
    return "sym_name" in operation.attributes and ir.StringAttr(operation.attributes["sym_name"]).value == "main"


def _with_kind(attributes, kind: str | None) -> dict:
    named = {attribute.name: attribute.attr for attribute in ir.DictAttr(attributes)}
    return named | ({_KIND: ir.StringAttr.get(kind)} if kind else {})


def _kind(named: dict) -> str:
    return ir.StringAttr(named[_KIND]).value if _KIND in named else "device"
