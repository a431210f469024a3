"""Plans a training step: checks the config for the GPUs, compiles the step, and adds what a caller asks for."""

import dataclasses
from collections.abc import Callable

from ml_collections import ConfigDict

from jaxlc.config import Config, load
from jaxlc.config.checks.mesh_checks import mesh_overrides, working_mesh
from jaxlc.config.models.context_length import context_warning
from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.generation.memory import rollout_memory
from jaxlc.plan.compiled_program import compile_log_probs
from jaxlc.plan.memory import evaluation_peak_bytes
from jaxlc.plan.packing_estimates import estimate_packing, read_documents
from jaxlc.plan.record import ReferencePass
from jaxlc.plan.result import Plan
from jaxlc.plan.step_program import StepProgram
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE, TimeModel
from jaxlc.simulate.timeline import predict
from jaxlc.simulate.topology import Topology, make_mesh
from jaxlc.step import verify_compiled
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import TrainStep, build_step, layer_kernels


def plan_step(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[], None],
    roofline: Roofline = DEFAULT_ROOFLINE,
    evaluation: bool = False,
    document_lengths: str = "",
) -> Plan:
    """Compiles the training step of `config` ahead of time for `gpus`, and makes a plan of it with hints.

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
    _ = step.kernel_choice, step.transport  # unsupported ones are reported before the compiler starts
    starting()
    program = StepProgram.compile(step, TimeModel(gpus, config, roofline))
    warning = context_warning(config.model, config.data.seq_len) or ""
    plan = dataclasses.replace(Plan.of(program), hints=hints(step), context_warning=warning)
    if evaluation:
        plan = dataclasses.replace(plan, evaluation_peak_bytes=program.evaluation_peak_bytes)
    if (rollouts := rollout_memory(step, documents.longest_trace if documents else 0)) is not None:
        plan = dataclasses.replace(plan, rollouts=rollouts)
    if step.reference is not None:
        plan = dataclasses.replace(plan, reference=_reference_pass(program))
    if documents:
        plan = dataclasses.replace(plan, packing=estimate_packing(documents, program))
    return plan


def _reference_pass(program: StepProgram) -> ReferencePass:
    """Compiles the reference model of the step. Raises UserError as `plan_step`."""
    reference = program.step.reference
    compiled = compile_log_probs(reference)
    verify_compiled.check_host_copies(compiled.program)
    return ReferencePass(
        seconds=predict(compiled.program, program.model).step_seconds,
        peak_bytes=evaluation_peak_bytes(program.step, program.memory, compiled),
        host_bytes=bytes_per_device(reference.abstract_state.params),
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
    if all(kernel.name != "cudnn" for kernel in layer_kernels(unmasked, step.mesh).values()):
        return ()
    return (
        "--config.attention.document_mask=False allows the cuDNN attention kernel, which is faster than"
        f" {step.kernel_names}; tokens then attend to earlier documents of their sequence",
    )
