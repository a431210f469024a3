"""What the compiled step really sends for attention, and how, against what the config asked for."""

from collections import Counter
from collections.abc import Sequence

import jax

from jaxlc.core.errors import UserError
from jaxlc.hlo import Program, analyze
from jaxlc.hlo.attention_collectives import AttentionCollective
from jaxlc.hlo.host_transfers import device_arrays, host_arguments
from jaxlc.hlo.op_names import PASSES
from jaxlc.runtime.transport import TransportSelection
from jaxlc.train.state import HOST
from jaxlc.train.step import TrainStep

_TITLES = {"nccl": "NCCL", "nvshmem": "NVSHMEM", "symmetric": "one-sided NCCL", "peer": "peer copies"}
_HOP = "collective-permute"  # of all that attention may send, what a transport is for


def describe(found: Sequence[AttentionCollective], *, strategy: str, num_layers: int) -> list[str]:
    """A line for each kind of exchange: "ring: 448 hops (14 x 32 layers), all NVSHMEM; unoverlapped: 0 of 224 forward".

    Unoverlapped is a hop with no attention kernel between its start and its done.
    """
    lines = []
    for kind in dict.fromkeys(hop.collective.kind for hop in found):
        alike = [hop for hop in found if hop.collective.kind == kind]
        what = "hop" if kind == _HOP else kind
        lines.append(
            f"{strategy}: {_count(alike, what, num_layers)}, {_transports(alike)}; unoverlapped: {_unoverlapped(alike)}"
        )
    return lines or [f"{strategy}: nothing to send"]


def mismatch(found: Sequence[AttentionCollective], asked: TransportSelection, *, strategy: str) -> str | None:
    """One sentence on what the program does instead of `asked`; None if it does that, or sends nothing at all."""
    carried = Counter()
    for hop in found:
        if hop.collective.kind == _HOP:
            carried[hop.collective.transport] += hop.times
    others = {name: times for name, times in carried.items() if name != asked.name}
    if others:
        sent = " and ".join(f"{times} by {_TITLES[name]}" for name, times in others.items())
        return f"of {carried.total()} hops the compiled step sends {sent}, and {_asked(asked)}"
    if found and not carried and asked.name != "nccl" and not asked.is_auto:
        return f"attention.strategy={strategy!r} makes no hops, and {_asked(asked)}, which carries nothing else"
    return None


def verify_compiled_step(step: TrainStep, compiled: jax.stages.Compiled) -> list[str]:
    """Lines to print about the compiled `step`; none on CPU.

    Raises:
      UserError: as `check`.
    """
    if step.transport is None:
        return []
    program = analyze(compiled.as_text())
    check_memory(step, program)
    found = program.attention_collectives
    lines = describe(found, strategy=step.config.attention.strategy, num_layers=step.config.model.num_layers)
    return lines + check(step, found)


def check(step: TrainStep, found: Sequence[AttentionCollective]) -> list[str]:
    """A warning if the compiled `step`, whose hops are `found`, has another transport than was asked for.

    Raises:
      UserError: that is so, and config.runtime.transport_mismatch is "error".
    """
    problem = mismatch(found, step.transport, strategy=step.config.attention.strategy)
    if problem is None:
        return []
    if step.config.runtime.transport_mismatch == "error":
        raise UserError(
            f"{problem}; use --config.runtime.transport=nccl, or take it as it is with"
            " --config.runtime.transport_mismatch=warn"
        )
    return [f"warning: {problem}"]


def check_memory(step: TrainStep, program: Program) -> None:
    """That the state which shall rest in host memory does, and that no copy of it is ever whole on the GPU.

    Of what is in no layer (embedding, head, final norm) each array is on the GPU whole while it is in use.

    Raises:
      UserError: the compiled `step` is not so.
    """
    spaces, state = step.memory_spaces, step.abstract_state
    leaves = list(zip(*map(jax.tree.leaves, (state, spaces)), strict=True))
    asked = Counter(_piece(x) for x, space in leaves if space is HOST)
    if not asked:
        return
    memory = step.config.memory
    settings = f"config.memory.parameters={memory.parameters!r} and .optimizer={memory.optimizer!r}"
    found = Counter(array.dims for array in host_arguments(program))
    missing = asked - found
    if missing:
        raise UserError(
            f"{settings} were asked for, and {missing.total()} of {asked.total()} arrays of the compiled step's state"
            " are not in host memory: this compiler leaves that out"
        )
    if step.config.model.num_layers == 1:
        return  # all layers at once are the one that is in use
    # Norm scales are small, and other arrays may well have their shapes. So have weights and moments, where only one of
    # them rests on the host.
    stacks = {_piece(x) for x in jax.tree.leaves(state.params["layers"]) if x.ndim > 2}
    stacks -= {_piece(x) for x, space in leaves if space is not HOST}
    for array in device_arrays(program):
        if array.dtype == "f32" and array.dims in stacks:
            raise UserError(
                f"{settings} were asked for, and the compiled step copies all layers' {list(array.dims)} to the GPU at"
                " once; use --config.memory.layers_per_remat_group=1, or leave them on the device"
            )


def _piece(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of one device's part."""
    return x.sharding.shard_shape(x.shape)


def _asked(asked: TransportSelection) -> str:
    return f"config.runtime.transport {'chose' if asked.is_auto else 'is'} {asked.name!r}"


def _count(found: Sequence[AttentionCollective], what: str, num_layers: int) -> str:
    """ "448 hops (14 x 32 layers)"."""
    total = sum(hop.times for hop in found)
    layers = f" ({total // num_layers} x {num_layers} layers)" if total % num_layers == 0 else ""
    return f"{total} {what}s{layers}"


def _transports(found: Sequence[AttentionCollective]) -> str:
    """ "all NVSHMEM", or how many by which."""
    times = Counter()
    for hop in found:
        times[_TITLES[hop.collective.transport]] += hop.times
    if len(times) == 1:
        return f"all {next(iter(times))}"
    return " and ".join(f"{count} {title}" for title, count in times.items())


def _unoverlapped(found: Sequence[AttentionCollective]) -> str:
    """ "0 of 224 forward, 32 of 224 backward"."""
    parts = []
    for which in PASSES:
        times = [(hop.times, hop.is_unoverlapped) for hop in found if hop.pass_name == which]
        if times:
            unoverlapped = sum(count for count, is_unoverlapped in times if is_unoverlapped)
            parts.append(f"{unoverlapped} of {sum(count for count, _ in times)} {which}")
    return ", ".join(parts)
