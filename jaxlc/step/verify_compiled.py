"""Checks the compiled step against the config: the transport of attention's collectives, host
memory, and what crosses nodes.

JAX drops the memory kinds of arguments and results where the GPUs are absent (AOT), so
`place_state` writes them into the lowered program.
"""

from collections import Counter
from collections.abc import Sequence

import jax
from jax.stages import Lowered
from jaxlib.mlir import ir

from jaxlc._jax_internals import kept_argument_indices
from jaxlc.core import UserError, is_layers, scopes
from jaxlc.hlo import AnalyzedProgram, Program, analyze
from jaxlc.hlo.collectives import device_arrays, has_constant_offset, host_arguments
from jaxlc.hlo.kernel_costs import AttentionCollective
from jaxlc.hlo.parser import PASSES, components, is_in_token_mixing
from jaxlc.models.contract import ChoosesKernel
from jaxlc.models.kinds import kinds_with
from jaxlc.runtime.xla_flags import TransportSelection
from jaxlc.sharding.rules import is_copied, is_vector
from jaxlc.step.state import HOST, PINNED_HOST
from jaxlc.step.step import TrainStep

# attributes of the lowered program's arguments and results
_KIND = "mhlo.memory_kind"
_ALIAS = "tf.aliasing_output"


def place_state(step: TrainStep, lowered: Lowered) -> None:
    """Writes into the lowered `step` which arrays of the state are in host memory."""
    kinds = _kinds(step.memory_spaces)
    if any(kinds):
        others = [None] * len(jax.tree.leaves(step.abstract_batch))
        place_in_memory(
            lowered, kinds + others, kinds + [None] * (lowered.out_tree.num_leaves - len(kinds))
        )


def place_params(step: TrainStep, lowered: Lowered) -> None:
    """As `place_state`, for the lowered evaluation of `step`, or its log-probabilities."""
    kinds = _kinds(step.memory_spaces.params)
    others = [None] * (lowered.in_tree.num_leaves - len(kinds))
    place_in_memory(lowered, kinds + others, [None])


def _kinds(spaces) -> list[str | None]:
    return [PINNED_HOST if space is HOST else None for space in jax.tree.leaves(spaces)]


def place_in_memory(
    lowered: Lowered, arguments: Sequence[str | None], results: Sequence[str | None]
) -> None:
    """Writes memory kinds into a lowered program, before `.compile()`, because JAX drops the kinds
    of absent GPUs.

    Absent devices list no memories, so a sharding with memory_kind="pinned_host" has no effect, and
    the bytes would count as device memory. Donation of an argument to a result in another memory is
    removed. The function must not have been compiled before: JAX caches its executable, and does
    not notice that the program has changed.

    Args:
      arguments, results: for each leaf "pinned_host" or "device", or None to keep it as it is.
    """
    kept = kept_argument_indices(lowered)
    module = lowered.compiler_ir("stablehlo")
    (main,) = (
        operation
        for operation in module.body.operations
        if (
            "sym_name" in operation.attributes
            and ir.StringAttr(operation.attributes["sym_name"]).value == "main"
        )
    )
    with module.context:
        result_attributes = [
            _with_kind(attributes, kind)
            for attributes, kind in zip(main.attributes["res_attrs"], results, strict=True)
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
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(named) for named in argument_attributes]
        )
        main.attributes["res_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(named) for named in result_attributes]
        )


def _with_kind(attributes, kind: str | None) -> dict:
    named = {attribute.name: attribute.attr for attribute in ir.DictAttr(attributes)}
    return named | ({_KIND: ir.StringAttr.get(kind)} if kind else {})


def _kind(named: dict) -> str:
    return ir.StringAttr(named[_KIND]).value if _KIND in named else "device"


_TITLES = {
    "nccl": "NCCL",
    "nvshmem": "NVSHMEM",
    "symmetric": "one-sided NCCL",
    "peer": "peer copies",
}
_NODE_SCOPES = (scopes.GATHER_NODE_COPY, scopes.SUM_OVER_NODES)
_SCALARS_BYTES = 2**16  # of sums of losses and of counts of experts
_HOP = "collective-permute"  # the only collective of attention to which a transport applies


def describe(
    attention_collectives: Sequence[AttentionCollective],
    *,
    strategy: str,
    num_layers: int,
    num_sliding: int = 0,
) -> list[str]:
    """One line per kind of collective: "ring: 448 hops (14 x 32 layers), all NVSHMEM; unoverlapped:
    0 of 224 forward".

    A hop is unoverlapped if no attention kernel runs between its start and its done.

    Args:
      num_sliding: number of layers with a sliding window, which have lines of their own.
    """
    lines = []
    groups = {}
    for hop in attention_collectives:
        groups.setdefault((hop.has_window, hop.collective.kind), []).append(hop)
    for (is_sliding, kind), same_kind in groups.items():
        noun = "hop" if kind == _HOP else kind
        count = _count(same_kind, noun, num_sliding if is_sliding else num_layers - num_sliding)
        where = f"{strategy}, sliding layers" if is_sliding else strategy
        lines.append(
            f"{where}: {count}, {_transports(same_kind)}; unoverlapped: {_unoverlapped(same_kind)}"
        )
    return lines or [f"{strategy}: nothing to send"]


def mismatch(
    attention_collectives: Sequence[AttentionCollective],
    requested: TransportSelection,
    *,
    strategy: str,
) -> str | None:
    """How the transports of the program differ from `requested`; None if they do not, or if nothing
    is sent.
    """
    times_by_transport = Counter()
    for hop in attention_collectives:
        if hop.collective.kind == _HOP:
            times_by_transport[hop.collective.transport] += hop.times
    others = {name: times for name, times in times_by_transport.items() if name != requested.name}
    if others:
        sent = " and ".join(f"{times} by {_TITLES[name]}" for name, times in others.items())
        return f"of {times_by_transport.total()} hops the compiled step sends {sent}, and {_request(requested)}"
    if (
        attention_collectives
        and not times_by_transport
        and requested.name != "nccl"
        and not requested.is_auto
    ):
        return f"attention.strategy={strategy!r} makes no hops, and {_request(requested)}, which applies only to hops"
    return None


def verify_compiled_step(step: TrainStep, compiled: jax.stages.Compiled) -> list[str]:
    """Returns lines that describe the compiled `step`; on CPU only the line of the copies of nodes,
    and none for a custom model.

    Raises:
      UserError: as `check`, `check_memory` and `check_node_copies`.
    """
    has_copies = bool(step.config.memory.node_copy_devices)
    if step.model is not None or (step.transport is None and not has_copies):
        return []
    program = analyze(compiled.as_text())
    copies = [check_node_copies(step, program)] if has_copies else []
    if step.transport is None:
        return copies
    check_memory(step, program)
    attention_collectives = program.attention_collectives
    model = step.config.model
    with_attention = kinds_with(ChoosesKernel, model)
    lines = describe(
        attention_collectives,
        strategy=step.config.attention.strategy,
        num_layers=sum(kind in with_attention for kind in model.kinds_of_layers),
        num_sliding=sum(model.window_of(kind) is not None for kind in model.kinds_of_layers),
    )
    return lines + copies + check(step, attention_collectives)


def verify_evaluation(step: TrainStep, compiled: jax.stages.Compiled) -> None:
    """Checks the transport of the compiled evaluation of `step`; not on CPU, and not for a custom
    model.

    Raises:
      UserError: it uses another transport, unless config.runtime.transport_mismatch is "warn".
    """
    if step.transport is not None and step.model is None:
        check(step, analyze(compiled.as_text()).attention_collectives)


def check(step: TrainStep, attention_collectives: Sequence[AttentionCollective]) -> list[str]:
    """Returns a warning if the compiled `step` does not use the requested transport.

    Raises:
      UserError: it does not, and config.runtime.transport_mismatch is "error".
    """
    problem = mismatch(
        attention_collectives, step.transport, strategy=step.config.attention.strategy
    )
    if problem is None:
        return []
    if step.config.runtime.transport_mismatch == "error":
        raise UserError(
            f"{problem}; use --config.runtime.transport=nccl, or accept it with"
            " --config.runtime.transport_mismatch=warn"
        )
    return [f"warning: {problem}"]


def check_memory(step: TrainStep, program: Program) -> None:
    """Checks that the state that config.memory puts in host memory is there, and that its layers
    are never all copied to the GPU at the same time. Arrays outside the layers (embedding, head,
    final norm) are copied one by one.

    Raises:
      UserError: the compiled `step` does not satisfy this.
    """
    spaces = step.memory_spaces
    state = step.abstract_state
    leaves = list(zip(*map(jax.tree.leaves, (state, spaces)), strict=True))
    requested = Counter(_shard_shape(x) for x, space in leaves if space is HOST)
    if not requested:
        return
    memory = step.config.memory
    model = step.config.model
    settings = f"config.memory.parameters={memory.parameters!r} and .optimizer={memory.optimizer!r}"
    missing = requested - Counter(array.dims for array in host_arguments(program))
    if missing:
        raise UserError(
            f"{settings}, but {missing.total()} of {requested.total()} arrays of the compiled step's state are not in"
            " host memory: this compiler does not support it"
        )
    # Norm scales and biases are skipped: they are small, and other arrays may have their shapes. If only the weights or
    # only the moments are in host memory, the others have the same shapes on the device. A stack of one layer is copied
    # as a whole, and if there are several kinds of layers, so is a remat group.
    group = memory.layers_per_remat_group
    num_at_once = 1
    if group > 1 and model.num_compiled_layers > 1:
        num_at_once = max(segment.remat_group(group) for segment in model.segments)
    layers = [name for name in state.params if is_layers(name)]
    params = jax.tree.leaves([state.params[name] for name in layers])
    dims = jax.tree.leaves(
        [step.dims[name] for name in layers], is_leaf=lambda x: isinstance(x, tuple)
    )
    matrices = [x for x, names in zip(params, dims, strict=True) if not is_vector(names)]
    stacks = {_shard_shape(x) for x in matrices if len(x) > num_at_once}
    stacks -= {_shard_shape(x) for x, space in leaves if space is not HOST}
    for array in device_arrays(program):
        if array.dtype == "f32" and array.dims in stacks:
            raise UserError(
                f"{settings}, but the compiled step copies all layers' {list(array.dims)} to the GPU at once;"
                " use --config.memory.layers_per_remat_group=1, or keep them on the device"
            )


def check_host_copies(program: AnalyzedProgram) -> None:
    """Checks that copy engines, not kernels, move what loops copy between device and host memory.

    A kernel that accesses host memory takes the multiprocessors for as long as the link does, so
    that no attention runs meanwhile. XLA compiles a slice of a host array to one where it does not
    know the offset as a function of the loop counter; see `jaxlc.models.offloaded_layers`. The
    fetch of one layer before a loop over layers may be a kernel.

    Raises:
      UserError: the program, with known thunks, has such kernels in loops.
    """
    whiles = (x for computation in program for x in computation if x.opcode == "while")
    bodies = {x.attributes["body"].lstrip("%") for x in whiles}
    copies = [
        copy
        for name in sorted(bodies)
        if program.execution_counts[name]
        for copy in program.host_copies[name]
        if not has_constant_offset(program.computations[name], copy)
    ]
    kernels = [copy for copy in copies if copy.is_kernel]
    if kernels:
        names = ", ".join(sorted({copy.start.op_name or copy.start.name for copy in kernels}))
        raise UserError(
            f"{len(kernels)} of {len(copies)} host copies in loops of the compiled step are kernels instead of copies"
            f" by the copy engines: {names}; use another JAX version or keep these arrays on the device (config.memory)"
        )


def check_node_copies(step: TrainStep, program: AnalyzedProgram) -> str:
    """Checks that weights and their gradients cross nodes once per step, and returns a line with
    the bytes.

    Attention exchanges more between nodes, and parameters without a copy have gradients of
    kilobytes.

    Raises:
      UserError: the compiled step sends more than that between nodes in a loop.
    """
    node_devices = step.config.memory.node_copy_devices
    abstract = step.abstract_state.params
    without_copy = jax.tree.map(
        lambda x, dims: 0 if is_copied(dims) else x.size, abstract, step.dims
    )
    # float32; an all-reduce sends twice.
    most_bytes = 2 * 4 * sum(jax.tree.leaves(without_copy)) + _SCALARS_BYTES
    # Without those of attention, and without the gathers of router logits that XLA adds on CPU,
    # where it does not partition top_k.
    for collective in program.collectives:
        op_name = collective.transfer.start.op_name
        is_top_k = collective.kind == "all-gather" and "top_k" in components(op_name)
        if collective.times <= 1 or is_top_k or is_in_token_mixing(op_name):
            continue
        groups = ({member // node_devices for member in group} for group in collective.groups)
        if collective.sent_bytes > most_bytes and any(len(nodes) > 1 for nodes in groups):
            name = op_name or collective.transfer.start.name
            raise UserError(
                f"config.memory.node_copy_devices={node_devices}, but the compiled step sends"
                f" {collective.sent_bytes:,} bytes between nodes {collective.times} times by the"
                f" {collective.kind} {name}: this compiler does not support it; use 0"
            )
    sent_bytes = dict.fromkeys(_NODE_SCOPES, 0)
    for collective in program.collectives:
        for scope in _NODE_SCOPES:
            if scope in components(collective.transfer.start.op_name):
                sent_bytes[scope] += collective.times * collective.sent_bytes
    gathered, summed = (f"{num_bytes / 2**30:.3g} GiB" for num_bytes in sent_bytes.values())
    return (
        f"weights of nodes of {node_devices} devices: each device sends {gathered} to gather them, and {summed} of"
        " gradients, once per step"
    )


def _shard_shape(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """The shape of one device's shard."""
    return x.sharding.shard_shape(x.shape)


def _request(requested: TransportSelection) -> str:
    return f"config.runtime.transport {'chose' if requested.is_auto else 'is'} {requested.name!r}"


def _count(attention_collectives: Sequence[AttentionCollective], noun: str, num_layers: int) -> str:
    """ "448 hops (14 x 32 layers)"."""
    total = sum(hop.times for hop in attention_collectives)
    layers = f" ({total // num_layers} x {num_layers} layers)" if total % num_layers == 0 else ""
    return f"{total} {noun}s{layers}"


def _transports(attention_collectives: Sequence[AttentionCollective]) -> str:
    """ "all NVSHMEM", or "3 NVSHMEM and 3 NCCL"."""
    times = Counter()
    for hop in attention_collectives:
        times[_TITLES[hop.collective.transport]] += hop.times
    if len(times) == 1:
        return f"all {next(iter(times))}"
    return " and ".join(f"{count} {title}" for title, count in times.items())


def _unoverlapped(attention_collectives: Sequence[AttentionCollective]) -> str:
    """ "0 of 224 forward, 32 of 224 backward"."""
    parts = []
    for which in PASSES:
        times = [
            (hop.times, hop.is_unoverlapped)
            for hop in attention_collectives
            if hop.pass_name == which
        ]
        if times:
            unoverlapped = sum(count for count, is_unoverlapped in times if is_unoverlapped)
            parts.append(f"{unoverlapped} of {sum(count for count, _ in times)} {which}")
    return ", ".join(parts)
