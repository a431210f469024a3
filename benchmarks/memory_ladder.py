"""How little memory a step can do with: each setting of config.memory in turn, steps beside those of other trainers,
and the longest rows that fit. Each is the real training step of Llama 3 8B, compiled for H100s that are not here."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlc import runtime
from jaxlc.config import Config, RuntimeConfig, defaults, load, with_settings
from jaxlc.core.axes import CONTEXT, MESH_AXES, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.sweep import runner, worker
from jaxlc.sweep.grid import Point, Setting
from jaxlc.sweep.worker import Row, Work

Settings = dict[str, Setting]

_FULL = {"memory.remat": "full"}
_RESIDUAL = _FULL | {"memory.offload": ("residual",)}
_ATTENTION_TOO = {"memory.offload": ("residual", "attention_out", "attention_lse")}
_ON_HOST = {"memory.optimizer": "host", "memory.parameters": "host"}

_NODE_GPUS = 8
_STEP_TOKENS, _STEP_TOKENS_OF_ONE = 2**18, 2**17  # for each GPU: how exactly the longest rows are looked for
_FIRST_TOKENS = 3 * 2**19  # for each GPU: what is tried first
_GROUP_SIZES = (1, 2, 4)  # layers that are recomputed together


class Case(NamedTuple):
    """A step that is compiled."""

    name: str  # in its table
    topology: str
    settings: Settings  # of the config, on top of `base`


class Baseline(NamedTuple):
    """What another trainer takes, and ours for the same tokens and GPUs."""

    name: str
    takes: str
    ours: tuple[Case, ...]


class Longest(NamedTuple):
    """The longest rows that fit so many GPUs, and the plan of those that are one step longer."""

    fits: Row
    beyond: Row

    @property
    def obstacle(self) -> str:
        """What stands in the way of longer rows; of the GPU with the largest array there."""
        largest = " ".join(self.beyond["largest"].split()[:3])
        in_the_way = [] if self.beyond["device_fits"] else [f"the GPU's memory ({largest})"]
        on_host = self.beyond["host_bytes_per_node"] + self.beyond["staging_bytes_per_node"]
        if on_host > self.beyond["host_usable_bytes_per_node"]:
            in_the_way.append("the host's memory")
        return " and ".join(in_the_way)


def base() -> Config:
    """Rows of one document, which is what long rows are made of and what cuDNN's attention is for."""
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.attention.document_mask = False
    return load(config)


def mesh(context: int, tensor: int = 1, strategy: str = "ulysses", ulysses_degree: int = 1) -> Settings:
    return {
        **dict.fromkeys((f"mesh.{axis}" for axis in MESH_AXES), 1),
        f"mesh.{CONTEXT}": context,
        f"mesh.{TENSOR}": tensor,
        "attention.strategy": strategy,
        "attention.ulysses_degree": ulysses_degree,
        "runtime.transport": "nccl",
    }


def rungs() -> list[Case]:
    """What each setting does to a step of 262,144 tokens on 8 GPUs; a row goes on from the one before, or says so."""
    tiles = _RESIDUAL | {"memory.tile_tokens": 8192}
    by_name = {
        "`remat=none`": {"memory.remat": "none"},
        "`remat=attention`": {"memory.remat": "attention"},
        "`remat=full`": _FULL,
        "and `offload=residual`": _RESIDUAL,
        "and `tile_tokens=8192`": tiles,
        "and `optimizer=host`": tiles | {"memory.optimizer": "host"},
        "and `parameters=host`": tiles | _ON_HOST,
        "and `layers_per_remat_group=2`": tiles | _ON_HOST | {"memory.layers_per_remat_group": 2},
        "`remat=full`, `offload=residual,attention_out,attention_lse`": _FULL | _ATTENTION_TOO,
        "`remat=full`, `strategy=ring`": _FULL | {"attention.strategy": "ring"},
        "`parameters=host` and all above it, `strategy=ring`": tiles | _ON_HOST | {"attention.strategy": "ring"},
    }
    tokens = {"data.seq_len": 262_144}
    return [Case(name, "h100:1x8", mesh(context=8) | tokens | settings) for name, settings in by_name.items()]


def baselines() -> list[Baseline]:
    """MaxText (TransformerEngine's ring, full remat, layer inputs on the host where it says offload) was compiled for
    the same GPUs: arguments and temporaries. TRL's figures are its own measurement, of Qwen3 8B."""
    eight, many = mesh(context=8), mesh(context=8, tensor=8, strategy="ring")
    short, long = {"data.seq_len": 262_144}, {"data.seq_len": 1_048_576}

    def ours(topology: str, settings: Settings, *of_memory: Settings) -> tuple[Case, ...]:
        return tuple(Case(_text(each), topology, settings | each) for each in of_memory)

    tiles, small_tiles, moments = (
        {"memory.tile_tokens": 16_384}, {"memory.tile_tokens": 8192}, {"memory.optimizer": "host"}
    )  # fmt: skip
    in_groups = _FULL | {"memory.layers_per_remat_group": 4} | small_tiles
    return [
        Baseline("MaxText, 1,048,576 tokens, 8 GPUs, offload", "47.1 GiB", ours(
            "h100:1x8", eight | long, _RESIDUAL | tiles, _RESIDUAL | tiles | moments, _RESIDUAL | tiles | _ON_HOST
        )),
        Baseline("MaxText, 262,144 tokens, 8 GPUs", "41.3 GiB", ours(
            "h100:1x8", eight | short, in_groups, in_groups | moments, _FULL | small_tiles | _ON_HOST
        )),
        Baseline("MaxText, 1,048,576 tokens, 64 GPUs, offload", "10.8 GiB", ours(
            "h100:8x8", many | long, _RESIDUAL | tiles
        )),
        Baseline("MaxText, 262,144 tokens, 64 GPUs", "6.8 GiB", ours(
            "h100:8x8", many | short, _FULL | small_tiles, _FULL | {"memory.tile_tokens": 4096}
        )),
        Baseline("TRL, 1,048,576 tokens, 8 GPUs", "56.2 GB (52.3 GiB), 380 s", ours(
            "h100:1x8", eight | long,
            _FULL | _ATTENTION_TOO,
            _FULL | _ATTENTION_TOO | {"memory.tile_tokens": 32_768},
        )),
    ]  # fmt: skip


def _text(settings: Settings) -> str:
    """{"memory.offload": ("a", "b"), ...} as "`offload=a,b ...`"."""
    texts = {path.partition(".")[2]: ",".join(x) if isinstance(x, tuple) else x for path, x in settings.items()}
    return "`" + " ".join(f"{name}={text}" for name, text in texts.items()) + "`"


def longest(num_gpus: int, plan: Callable[[Case], Row]) -> Longest:
    """The longest rows, in whole steps, that `num_gpus` can be trained on with all that memory settings can do.

    Layers are recomputed in larger groups for as long as it is the host that holds back.

    Args:
      plan: compiles.
    """
    unit = num_gpus * (_STEP_TOKENS if num_gpus > 1 else _STEP_TOKENS_OF_ONE)
    best, most = None, 0
    for layers_per_remat_group in _GROUP_SIZES:
        name = f"{num_gpus} GPUs, layers_per_remat_group={layers_per_remat_group}"
        settings = _longest_settings(num_gpus) | {"memory.layers_per_remat_group": layers_per_remat_group}

        def planned(units: int, name=name, settings=settings) -> Row:
            return plan(Case(name, topology_of(num_gpus), settings | {"data.seq_len": units * unit}))

        found = most_that_fit(planned, least=most, first=2 * most or _FIRST_TOKENS * num_gpus // unit)
        if found is None:
            break
        most, best = found[0], Longest(*found[1:])
        if not best.beyond["device_fits"]:
            break  # which larger groups take more of
    if best is None:
        raise UserError(f"{num_gpus} GPUs do not even hold rows of {unit} tokens")
    return best


def most_that_fit(row_of: Callable[[int], Row], least: int, first: int) -> tuple[int, Row, Row] | None:
    """The largest n > least whose row fits, that row and the next one's; None if there is none.

    Memory is nearly a straight line over n, so few rows do: each try is where the line through the two that are nearest
    to the limit meets it.
    """
    rows: dict[int, Row] = {}
    most, too_many, n = least, 2**62, first
    while most + 1 < too_many:
        rows[n] = row_of(n)
        if rows[n]["fits"]:
            most = n
        else:
            too_many = n
        n = min(max(_expected(rows), most + 1), too_many - 1)
    return (most, rows[most], rows[too_many]) if most > least else None


def _expected(rows: dict[int, Row]) -> int:
    """The n at which a limit is reached, by the rows that there are."""
    loads = sorted(((_load(row), n) for n, row in rows.items()), key=lambda pair: abs(pair[0] - 1))
    (load, n), *others = loads
    if not others or load == others[0][0]:
        return int(n / load)
    other_load, other = others[0]
    return int(n + (1 - load) * (other - n) / (other_load - load))


def _load(row: Row) -> float:
    """What is taken, of what there is; on the GPU or the host, whichever is fuller."""
    on_host = row["host_bytes_per_node"] + row["staging_bytes_per_node"]
    return max(row["device_peak_bytes"] / row["device_usable_bytes"], on_host / row["host_usable_bytes_per_node"])


def numbers_of_gpus(texts: Sequence[str]) -> list[int]:
    """Reads what a user gives.

    Raises:
      UserError: no number, or one for which there is no topology of whole nodes.
    """
    for text in texts:
        whole = int(text) if text.isdigit() else 0
        if whole not in (1, 2, 4) and (whole == 0 or whole % _NODE_GPUS):
            raise UserError(f"{text!r} is no number of GPUs here; use 1, 2, 4, or a multiple of {_NODE_GPUS}")
    return [int(text) for text in texts]


def topology_of(num_gpus: int) -> str:
    return f"h100:1x{num_gpus}" if num_gpus <= _NODE_GPUS else f"h100:{num_gpus // _NODE_GPUS}x{_NODE_GPUS}"


def _longest_settings(num_gpus: int) -> Settings:
    """Heads are exchanged within a node; K and V go around the nodes."""
    parts = mesh(context=num_gpus)
    if num_gpus > _NODE_GPUS:
        parts = mesh(context=num_gpus, strategy="hybrid", ulysses_degree=_NODE_GPUS)
    return parts | _RESIDUAL | {"memory.tile_tokens": 32_768} | _ON_HOST


def compile_cases(cases: Sequence[Case], out: Path, work: Work | None = None, num_workers: int = 1) -> list[Row]:
    """A row each, in their order; those that are in out/points.jsonl already are not compiled again.

    Raises:
      UserError: a case cannot be compiled.
    """
    rows = {}
    for topology in dict.fromkeys(case.topology for case in cases):
        points = [point(case) for case in cases if case.topology == topology]
        found = runner.run(
            points,
            work or functools.partial(worker.estimate, topology=topology),
            about=dict(topology=topology, model=base().model.preset),
            out=out,
            num_workers=num_workers,
        )
        rows |= {(topology, row["overrides"]): row for row in found}
    in_order = [rows[case.topology, point(case).overrides] for case in cases]
    for case, row in zip(cases, in_order, strict=True):
        if row["status"] != "done":
            raise UserError(f"{case.name} on {case.topology}: {row['reason']}")
    return in_order


def point(case: Case) -> Point:
    settings = {"memory.remat": "full"} | case.settings
    return Point(settings=settings, config=with_settings(base(), settings))


def start() -> None:
    """For programs that are compiled only."""
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")  # of the workers too
    runtime.start(RuntimeConfig())
