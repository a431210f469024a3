"""Runs a function on points, each in its own process.

Every row is appended to a file as soon as it is known. A command that is started again skips the
points in that file.

The leading process does not start JAX, which would reserve the memory of the devices. `*_point` is
the work on one point, in its own process (`jaxlc.core.processes`).
"""

import functools
import importlib.metadata
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlc.config import Config, RuntimeConfig, to_dict
from jaxlc.config.models.presets import model_name
from jaxlc.core import Log, UserError, progress_lines
from jaxlc.core import print_to_stderr as log
from jaxlc.core.files import (
    file_fingerprint,
    fingerprint_of,
    local_path,
    make_writable,
    read_json_lines,
)
from jaxlc.core.processes import Row, Work, run_in_processes
from jaxlc.search.ranking import ROWS, row_text
from jaxlc.search.space import Point, departures, name_of

if TYPE_CHECKING:
    from jaxlc.plan.result import Plan

_TIMED_STEPS = 5
# how the names of packages on which a compiled step depends begin
_COMPILING = ("jax", "nvidia-", "dew-flash-attn", "tokamax")
_TIMES = (  # columns, of `Prediction` and of `Memory`
    "step_seconds", "tokens_per_second_per_device", "mfu_causal", "recomputed_share", "exposed_communication_seconds",
    "exposed_host_copy_seconds", "bound_by",
)  # fmt: skip
_MEMORY = (
    "fits", "device_fits", "device_peak_bytes", "device_capacity_bytes", "symmetric_used_bytes", "host_bytes_per_node",
    "staging_bytes_per_node",
)  # fmt: skip


def estimate_point(
    config: Config,
    constants: str = "",
    devices_per_process: int = 1,
    host_memory_gib: float | None = None,
    document_lengths: str = "",
) -> Row:
    """The values of the plan of the training step, AOT-compiled for config.runtime.topology, that a ranking needs.

    Args:
      devices_per_process: GPUs per process; fewer if they do not divide the GPUs of a domain, as in a part of a node.
      constants, host_memory_gib, document_lengths: as for `jaxlc.plan.plan`.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # also in child processes
    from jaxlc.plan.result import plan_step
    from jaxlc.runtime.start import start
    from jaxlc.simulate.roofline import from_file
    from jaxlc.simulate.topology import topology as parse_topology

    start(RuntimeConfig(num_processes=1))
    name = config.runtime.topology
    gpus = parse_topology(
        name,
        devices_per_process=math.gcd(devices_per_process, parse_topology(name).gpus_per_domain),
        host_memory_gib=host_memory_gib,
    )
    roofline = from_file(constants)
    return row_of(
        plan_step(config, gpus, lambda: None, roofline, document_lengths=document_lengths), config
    )


def row_of(result: "Plan", config: Config) -> Row:
    """The columns of a compiled step, for its documents if the plan has them; `core.processes`
    adds its status.
    """
    predicted = result.predicted
    memory = result.memory
    ring = result.ring
    low, high = predicted.step_seconds_interval
    largest = (
        f"{array.shape} {array.bytes / 2**30:.2f} GiB {array.made_by}"
        for array in memory.largest[:3]
    )
    by_resource = predicted.seconds_by_resource.items()
    times = {name: getattr(predicted, name) for name in _TIMES}
    relative = 1.0
    if result.packing is not None:
        documents = result.packing.estimates[-1]  # the mean, or the only one
        relative = documents.step_seconds / predicted.step_seconds
        times |= dict(step_seconds=documents.step_seconds, mfu_causal=documents.mfu_documents)
        times["tokens_per_second_per_device"] = documents.tokens_per_second_per_device
    return dict(
        **times,
        step_seconds_low=low * relative,
        step_seconds_high=high * relative,
        time_by_resource=", ".join(
            f"{name} {seconds / predicted.step_seconds:.2g}" for name, seconds in by_resource
        ),
        **{name: getattr(memory, name) for name in _MEMORY},
        device_compiled_bytes=memory.device_arguments_bytes
        + memory.device_temp_bytes
        + memory.symmetric_used_bytes,
        device_usable_bytes=memory.usable_bytes,
        host_usable_bytes_per_node=memory.usable_host_bytes,
        largest="; ".join(largest),
        hops=ring.hops,
        hops_exposed=ring.exposed,
        hops_by=", ".join(sorted(ring.by_backend)),
        kernel=result.kernel_choice.partition(" ")[0],
        compile_seconds=result.compile_seconds,
        num_devices=result.num_devices,
        departures=len(departures(config)),
        warnings="; ".join(_warnings(result)),
        pools=memory.pool_settings,
    )


def _warnings(plan: "Plan") -> Iterator[str]:
    """What the page of the plan warns about, except for sizes of pools (`Memory.pool_settings`)."""
    from jaxlc.plan import report

    memory = plan.memory
    yield from plan.hints
    yield from report.warnings(plan)
    if memory.spilled_bytes:
        yield "unified memory: a part of the device memory is in host memory, whose accesses the estimate lacks"
    if plan.ring.exposed and memory.is_at_schedulers_limit:
        yield "temporaries reach the limit of XLA's scheduler, which gives up overlap"


def local_devices(config: Config) -> Row:
    """The kind and number of the devices of this machine."""
    import jax

    from jaxlc.runtime.start import start

    start(config.runtime)

    return dict(device=jax.devices()[0].device_kind, num_devices=jax.device_count())


def measure_point(config: Config) -> Row:
    """Times the training step on the devices of this machine. Raises JAX's error if they run out of
    memory.
    """
    from jaxlc.runtime.start import start
    from jaxlc.search.measure import measure_step
    from jaxlc.step.memory import pinned_bytes

    start(config.runtime, pinned_host_bytes=pinned_bytes(config).pooled)
    figures = measure_step(config, _TIMED_STEPS)
    return dict(
        step_seconds=figures["seconds"],
        tokens_per_second_per_device=figures["tokens_per_second_per_device"],
        mfu_causal=figures["mfu_causal"],
        fits=True,
        device_peak_bytes=figures["peak_bytes"]
        or figures["arguments_bytes"] + figures["temp_bytes"],
        kernel=figures["kernel"],
        loss=figures["loss"],
    )


IsOver = Callable[[Collection[Row]], bool]
STOPPED = dict(status="stopped", reason="at the time limit")


def estimate(
    points: Sequence[Point],
    topology: str,
    constants: str,
    *,
    out: Path,
    num_workers: int,
    log: Log = log,
    is_over: IsOver = lambda rows: False,
    documents: str | None = None,
    **options: Any,
) -> list[Row]:
    """AOT-compiles the points' steps and estimates their times, as `run` does.

    Args:
      topology: the GPUs of the command; those of a point, in its config, may be a part of them.
      documents: the fingerprint of the documents that `document_lengths` names, since files change.
      options: of `estimate_point`; None has no effect.
    """
    options = {name: value for name, value in options.items() if value is not None}
    about = (
        dict(figures="estimated", topology=topology, model=model_name(vars(points[0].base.model)))
        | options
    )
    # other constants and documents give other rows
    if constants:
        about["constants"] = file_fingerprint(local_path(constants))
    if documents:
        about["documents"] = documents
    work = functools.partial(estimate_point, constants=constants, **options)
    return run(
        points, work, about=about, out=out, num_workers=num_workers, log=log, is_over=is_over
    )


def run(
    points: Sequence[Point],
    work: Work,
    *,
    about: Row,
    out: Path,
    num_workers: int,
    log: Log = log,
    is_over: IsOver = lambda rows: False,
) -> list[Row]:
    """Runs `work` on all points that are not in out/points.jsonl and returns the rows of all points, in their order.
    Rows of processes that died are not in the file, so that the same command repeats them. Rows of other code, packages
    or flags of XLA have other keys.

    Args:
      work: computes the figures of one config; see `jaxlc.search.runner`.
      about: columns with the same value in all rows, such as the topology. The version of JAX is added.
      log: called with lines that report progress.
      is_over: called about twice a second with the rows so far; when it is true, points without one are `STOPPED`.
    Raises:
      UserError: `out` is not writable.
      KeyboardInterrupt: with the number of finished points in its message.
    """
    path = out / ROWS
    make_writable(out, "use another working directory, or another --out of a sweep")
    about = about | dict(jax=importlib.metadata.version("jax"))
    others = about | _environment()
    keys = [  # the whole config, the columns that all rows share, and the environment
        fingerprint_of(json.dumps([to_dict(point.config), others], sort_keys=True))
        for point in points
    ]
    rows = {row["key"]: row for row in read_json_lines(path)}
    configs = dict[str, Config]()
    new = {key: point for key, point in zip(keys, points) if key not in rows}
    if len(new) < len(points):
        log(f"{len(points) - len(new)} of {len(points)} points are already in {path}")
    if path.exists():  # without an incomplete line at its end
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    with path.open("a") as file:

        def add(key: str, figures: Row) -> None:
            settings = new[key].columns() | dict(overrides=new[key].overrides)
            rows[key] = dict(key=key) | about | settings | figures
            if "exit_code" not in figures:
                file.write(json.dumps(rows[key]) + "\n")
                file.flush()

        for key, point in new.items():
            try:
                configs[key] = point.checked()
            except UserError as error:
                add(key, dict(status="refused", reason=str(error)))
        total = len(configs)
        if total:
            log(
                f"running {total} points, {min(num_workers, total)} at a time; results go to {path}"
            )
        try:
            with progress_lines(f"running {total} points", is_shown=total > 0, log=log) as update:
                ended = lambda: is_over([rows[key] for key in new if key in rows])  # noqa: E731
                results = run_in_processes([*configs.values()], work, num_workers, ended)
                for num_run, (index, figures) in enumerate(results, start=1):
                    key, config = [*configs.items()][index]
                    add(key, figures)
                    update(num_run, total)
                    about_run = f"{config.data.seq_len:,} tokens, {config.runtime.transport}"
                    log(f"{num_run}/{total} {name_of(config)}, {about_run}: {row_text(rows[key])}")
        except KeyboardInterrupt:
            num_done = sum(key in rows for key in keys)
            raise KeyboardInterrupt(
                f"interrupted: {num_done} of {len(points)} points are in {path}; the same command resumes"
            ) from None
    return [rows.get(key, STOPPED) for key in keys]


def _environment() -> Row:
    """What the figures of a config depend on besides it: the code of jaxlc, the packages of JAX, CUDA and kernels, and
    the user's flags of XLA."""
    package = Path(__file__).parents[1]
    packages = importlib.metadata.distributions()
    return dict(
        code=[file_fingerprint(path) for path in sorted(package.rglob("*.py"))],
        packages=sorted(
            {f"{x.name} {x.version}" for x in packages if f"{x.name}".startswith(_COMPILING)}
        ),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
    )
