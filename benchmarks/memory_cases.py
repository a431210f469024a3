"""Cases of the memory tables: an ablation of config.memory, baselines of other trainers, and the
search for the maximum sequence length. Each case is the training step of Llama 3.1 8B, AOT-compiled
for H100s."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxlc.config import Config, RuntimeConfig, defaults, load
from jaxlc.core.axes import CONTEXT, MESH_AXES, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.core.processes import Row, Work
from jaxlc.runtime import start as jax_start
from jaxlc.search import runner
from jaxlc.search.space import Point, Settings

_FULL = {"memory.remat": "full"}
_OFFLOAD = _FULL | {"memory.offload": ("residual",)}
_OFFLOAD_ATTENTION = {"memory.offload": ("residual", "attention_out", "attention_lse")}
_ON_HOST = {"memory.optimizer": "host", "memory.parameters": "host"}

_NODE_GPUS = 8
# per GPU: resolution of the search for the maximum
_UNIT_TOKENS, _UNIT_TOKENS_OF_ONE_GPU = 2**18, 2**17
_FIRST_TOKENS = 3 * 2**19  # per GPU: the first sequence length that is tried
_GROUP_SIZES = (1, 2, 4)  # values of layers_per_remat_group


class Case(NamedTuple):
    """A training step to compile."""

    name: str  # label in the table
    topology: str
    settings: Settings  # on top of `base`


class Baseline(NamedTuple):
    """The memory of another trainer, and our cases with the same sequence length and GPUs."""

    name: str
    reported: str  # its memory per GPU
    ours: tuple[Case, ...]


class MaxSeqLen(NamedTuple):
    """The rows of the longest sequence that fits, and of the next longer one, which does not."""

    fits: Row
    too_long: Row

    @property
    def bottleneck(self) -> str:
        """The memory that the next longer sequence exceeds: the GPU's, with its largest array, or
        the host's.
        """
        largest = " ".join(self.too_long["largest"].split()[:3])
        exceeded = [] if self.too_long["device_fits"] else [f"GPU memory ({largest})"]
        on_host = self.too_long["host_bytes_per_node"] + self.too_long["staging_bytes_per_node"]
        if on_host > self.too_long["host_usable_bytes_per_node"]:
            exceeded.append("host memory")
        return " and ".join(exceeded)


def base() -> Config:
    """Llama 3.1 8B. One document per sequence, the common case of long sequences, so that cuDNN
    attention is used.
    """
    config = defaults()
    config.model.preset = "llama3.1-8b"
    config.attention.document_mask = False
    config.memory.loss_chunk_tokens = 1024  # of the published tables
    return load(config)


def mesh(
    context: int, tensor: int = 1, strategy: str = "ulysses", ulysses_degree: int = 1
) -> Settings:
    return {
        **dict.fromkeys((f"mesh.{axis}" for axis in MESH_AXES), 1),
        f"mesh.{CONTEXT}": context,
        f"mesh.{TENSOR}": tensor,
        "attention.strategy": strategy,
        "attention.ulysses_degree": ulysses_degree,
        "runtime.transport": "nccl",
    }


def ablation() -> list[Case]:
    """The effect of each memory setting at 262,144 tokens on 8 GPUs. "and" adds a setting to those
    of the row above.
    """
    tiles = _OFFLOAD | {"memory.tile_tokens": 8192}
    by_name = {
        "`remat=none`": {"memory.remat": "none"},
        "`remat=attention`": {"memory.remat": "attention"},
        "`remat=full`": _FULL,
        "and `offload=residual`": _OFFLOAD,
        "and `tile_tokens=8192`": tiles,
        "and `optimizer=host`": tiles | {"memory.optimizer": "host"},
        "and `parameters=host`": tiles | _ON_HOST,
        "and `layers_per_remat_group=2`": tiles | _ON_HOST | {"memory.layers_per_remat_group": 2},
        "`remat=full`, `offload=residual,attention_out,attention_lse`": _FULL | _OFFLOAD_ATTENTION,
        "`remat=full`, `strategy=ring`": _FULL | {"attention.strategy": "ring"},
        "`parameters=host` and all settings above it, `strategy=ring`": tiles
        | _ON_HOST
        | {"attention.strategy": "ring"},
    }
    tokens = {"data.seq_len": 262_144}
    return [
        Case(name, "h100:1x8", mesh(context=8) | tokens | settings)
        for name, settings in by_name.items()
    ]


def baselines() -> list[Baseline]:
    """Other trainers.

    MaxText was AOT-compiled for the same GPUs (TransformerEngine's ring, full remat, and for
    "offload" layer inputs in host memory); its figures are arguments and temporaries. TRL's figures
    are its own measurements of Qwen3 8B.
    """
    eight, many = mesh(context=8), mesh(context=8, tensor=8, strategy="ring")
    short, long = {"data.seq_len": 262_144}, {"data.seq_len": 1_048_576}

    def ours(topology: str, settings: Settings, *memory_settings: Settings) -> tuple[Case, ...]:
        return tuple(Case(_text(memory), topology, settings | memory) for memory in memory_settings)

    tiles, small_tiles, moments = (
        {"memory.tile_tokens": 16_384}, {"memory.tile_tokens": 8192}, {"memory.optimizer": "host"}
    )  # fmt: skip
    in_groups = _FULL | {"memory.layers_per_remat_group": 4} | small_tiles
    return [
        Baseline("MaxText, 1,048,576 tokens, 8 GPUs, offload", "47.1 GiB", ours(
            "h100:1x8", eight | long, _OFFLOAD | tiles, _OFFLOAD | tiles | moments, _OFFLOAD | tiles | _ON_HOST
        )),
        Baseline("MaxText, 262,144 tokens, 8 GPUs", "41.3 GiB", ours(
            "h100:1x8", eight | short, in_groups, in_groups | moments, _FULL | small_tiles | _ON_HOST
        )),
        Baseline("MaxText, 1,048,576 tokens, 64 GPUs, offload", "10.8 GiB", ours(
            "h100:8x8", many | long, _OFFLOAD | tiles
        )),
        Baseline("MaxText, 262,144 tokens, 64 GPUs", "6.8 GiB", ours(
            "h100:8x8", many | short, _FULL | small_tiles, _FULL | {"memory.tile_tokens": 4096}
        )),
        Baseline("TRL, 1,048,576 tokens, 8 GPUs", "56.2 GB (52.3 GiB), 380 s", ours(
            "h100:1x8", eight | long,
            _FULL | _OFFLOAD_ATTENTION,
            _FULL | _OFFLOAD_ATTENTION | {"memory.tile_tokens": 32_768},
        )),
    ]  # fmt: skip


def _text(settings: Settings) -> str:
    """{"memory.offload": ("a", "b"), ...} as "`offload=a,b ...`"."""
    texts = {
        path.partition(".")[2]: ",".join(x) if isinstance(x, tuple) else x
        for path, x in settings.items()
    }
    return "`" + " ".join(f"{name}={text}" for name, text in texts.items()) + "`"


def max_seq_len(num_gpus: int, plan: Callable[[Case], Row]) -> MaxSeqLen:
    """Searches the longest sequence that fits on `num_gpus` with all memory settings, in units of
    2^18 tokens per GPU.

    While host memory is the bottleneck, `layers_per_remat_group` is increased.

    Args:
      plan: compiles a case and returns its row.
    Raises:
      UserError: not even one unit fits.
    """
    unit = num_gpus * (_UNIT_TOKENS if num_gpus > 1 else _UNIT_TOKENS_OF_ONE_GPU)
    best, max_units = None, 0
    for layers_per_remat_group in _GROUP_SIZES:
        name = f"{num_gpus} GPUs, layers_per_remat_group={layers_per_remat_group}"
        settings = _max_seq_len_settings(num_gpus) | {
            "memory.layers_per_remat_group": layers_per_remat_group
        }

        def planned(units: int, name=name, settings=settings) -> Row:
            return plan(
                Case(name, topology_of(num_gpus), settings | {"data.seq_len": units * unit})
            )

        result = largest_that_fits(
            planned, least=max_units, first=2 * max_units or _FIRST_TOKENS * num_gpus // unit
        )
        if result is None:
            break
        max_units, best = result[0], MaxSeqLen(*result[1:])
        if not best.too_long["device_fits"]:
            break  # larger groups need more GPU memory
    if best is None:
        raise UserError(
            f"no sequence fits: even {unit} tokens exceed the memory of {num_gpus} GPUs"
        )
    return best


def largest_that_fits(
    row_of: Callable[[int], Row], least: int, first: int
) -> tuple[int, Row, Row] | None:
    """The largest n > least whose row fits, its row, and the row of n + 1; None if there is none.

    Memory is nearly linear in n. Each try is the n at which the line through the two rows nearest
    to the limit reaches it, so few rows are compiled.
    """
    rows: dict[int, Row] = {}
    best, too_large, n = least, 2**62, first
    while best + 1 < too_large:
        rows[n] = row_of(n)
        if rows[n]["fits"]:
            best = n
        else:
            too_large = n
        n = min(max(_n_at_limit(rows), best + 1), too_large - 1)
    return (best, rows[best], rows[too_large]) if best > least else None


def _n_at_limit(rows: dict[int, Row]) -> int:
    """The n at which memory reaches its limit, extrapolated from `rows`."""
    loads = sorted(((_load(row), n) for n, row in rows.items()), key=lambda pair: abs(pair[0] - 1))
    (load, n), *others = loads
    if not others or load == others[0][0]:
        return int(n / load)
    other_load, other = others[0]
    return int(n + (1 - load) * (other - n) / (other_load - load))


def _load(row: Row) -> float:
    """The used share of GPU or host memory, the larger of the two."""
    on_host = row["host_bytes_per_node"] + row["staging_bytes_per_node"]
    return max(
        row["device_peak_bytes"] / row["device_usable_bytes"],
        on_host / row["host_usable_bytes_per_node"],
    )


def parse_num_gpus(texts: Sequence[str]) -> list[int]:
    """Parses the flag --gpus.

    Raises:
      UserError: not a number, or not a number of whole nodes.
    """
    for text in texts:
        number = int(text) if text.isdigit() else 0
        if number not in (1, 2, 4) and (number == 0 or number % _NODE_GPUS):
            raise UserError(
                f"invalid {text!r} for --gpus: expected 1, 2, 4, or a multiple of {_NODE_GPUS}"
            )
    return [int(text) for text in texts]


def topology_of(num_gpus: int) -> str:
    return (
        f"h100:1x{num_gpus}"
        if num_gpus <= _NODE_GPUS
        else f"h100:{num_gpus // _NODE_GPUS}x{_NODE_GPUS}"
    )


def _max_seq_len_settings(num_gpus: int) -> Settings:
    """Ulysses within a node; a ring over the nodes."""
    settings = mesh(context=num_gpus)
    if num_gpus > _NODE_GPUS:
        settings = mesh(context=num_gpus, strategy="hybrid", ulysses_degree=_NODE_GPUS)
    return settings | _OFFLOAD | {"memory.tile_tokens": 32_768} | _ON_HOST


def compile_cases(
    cases: Sequence[Case], out: Path, work: Work | None = None, num_workers: int = 1
) -> list[Row]:
    """Compiles the cases and returns their rows in the same order. Rows in out/points.jsonl are
    reused.

    Raises:
      UserError: a case cannot be compiled.
    """
    rows = runner.run(
        [point(case) for case in cases],
        work or runner.estimate_point,
        about=dict(model=base().model.preset),
        out=out,
        num_workers=num_workers,
    )
    for case, row in zip(cases, rows, strict=True):
        if row["status"] != "done":
            raise UserError(f"{case.name} on {case.topology}: {row['reason']}")
    return rows


def point(case: Case) -> Point:
    settings = {"memory.remat": "full", "runtime.topology": case.topology} | case.settings
    return Point(base=base(), settings=settings)


def start() -> None:
    """Starts JAX on CPU, for programs that only compile."""
    os.environ.update(JAX_PLATFORMS="cpu", TF_CPP_MIN_LOG_LEVEL="3")  # inherited by the workers
    jax_start.start(RuntimeConfig())
