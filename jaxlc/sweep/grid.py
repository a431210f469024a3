"""What a sweep visits: every mesh of so many devices, with every strategy, remat, length and transport asked for.

Imports no jax: the process that leads a sweep must leave the devices to those that measure.
"""

import difflib
import math
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from jaxlc.config import Config, transport_settings, with_settings
from jaxlc.config.loading import did_you_mean, field_types
from jaxlc.core.axes import CONTEXT, DATA, FSDP, MESH_AXES, TENSOR
from jaxlc.core.errors import UserError

Setting = int | str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is tried in every combination. Axes that are not named keep the config's size."""

    axes: tuple[str, ...]
    strategies: tuple[str, ...]
    remats: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of a row
    transports: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A config of the sweep, or the reason why it is none."""

    settings: dict[str, Setting]  # by their paths: "mesh.context" -> 8
    config: Config | None
    refusal: str = ""

    @property
    def overrides(self) -> str:
        """Of the command line; only on top of the config that the sweep began with."""
        texts = {path: ",".join(x) if isinstance(x, tuple) else x for path, x in self.settings.items()}
        return " ".join(f"--config.{path}={text}" for path, text in texts.items())

    def columns(self) -> dict[str, Setting]:
        """The settings under their last names."""
        return {path.rpartition(".")[2]: value for path, value in self.settings.items()}


def space(
    config: Config,
    *,
    axes: str | None = None,
    strategies: str | None = None,
    remat: str | None = None,
    sequence: str | None = None,
    transports: str | None = None,
) -> Space:
    """Reads what a user gives, each a list with commas; None is the config's own value, and for axes all but data.

    Raises:
      UserError: a name that there is not, or a length that is no number.
    """
    lengths = sequence.split(",") if sequence else [str(config.data.seq_len)]
    for length in lengths:
        if not length.isdigit():
            raise UserError(f"--sequence has {length!r}, which is not a whole number; write --sequence=65536,262144")
    return Space(
        axes=_names(axes or f"{CONTEXT},{TENSOR},{FSDP}", MESH_AXES, "mesh axis"),
        strategies=_names(strategies or config.attention.strategy, _choices("attention", "strategy"), "strategy"),
        remats=_names(remat or config.memory.remat, _choices("memory", "remat"), "remat"),
        lengths=tuple(dict.fromkeys(map(int, lengths))),
        transports=_names(transports or config.runtime.transport, _choices("runtime", "transport"), "transport"),
    )


def points(config: Config, num_devices: int, space: Space) -> tuple[list[Point], int]:
    """All points, those that the config's checks refuse among them, and how many combinations are none of their own.

    Those are all strategies but the first where nothing splits the sequence, since none has anything to do, and hybrid
    where context has no divisor that cuts it into exchange and ring. The batch keeps its rows, and a replica takes as
    many at a time as in `config`.

    Raises:
      UserError: no mesh of these axes has so many devices.
    """
    meshes = list(_meshes(config, num_devices, space.axes))
    if not meshes:
        sizes = " x ".join(f"{axis}={size}" for axis, size in _sizes(config).items() if axis not in space.axes)
        raise UserError(
            f"no mesh of the axes {', '.join(space.axes)} beside {sizes} has {num_devices} devices; name more of --axes"
        )
    found, num_left_out = [], 0
    combinations = product(space.lengths, space.transports, space.remats, meshes, space.strategies)
    for length, transport, remat, mesh, strategy in combinations:
        is_same = mesh[CONTEXT] == 1 and strategy != space.strategies[0]
        ranks = [1] if strategy != "hybrid" or mesh[CONTEXT] == 1 else _ulysses_degree(config, mesh)
        if is_same or not ranks:
            num_left_out += 1
            continue
        settings = {
            **{f"mesh.{axis}": size for axis, size in mesh.items()},
            "attention.strategy": strategy,
            "attention.ulysses_degree": ranks[0],
            "memory.remat": remat,
            "data.seq_len": length,
            "runtime.transport": transport,
            **_batch(config, mesh[DATA] * mesh[FSDP]),
        }
        found.append(_point(config, settings, num_devices))
    return found, num_left_out


def _names(given: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b"), each of which must be known."""
    names = tuple(dict.fromkeys(given.split(",")))
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            raise UserError(f"there is no {what} {name!r}; {did_you_mean(nearest, known)}")
    return names


def _choices(section: str, name: str) -> tuple[str, ...]:
    return typing.get_args(field_types(section)[name])


def _sizes(config: Config) -> dict[str, int]:
    return {axis: getattr(config.mesh, axis) for axis in MESH_AXES}


def _meshes(config: Config, num_devices: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Sizes of all axes, shortest rings and fewest replicas first."""
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for sizes in product(divisors, repeat=len(axes)):
        mesh = _sizes(config) | dict(zip(axes, sizes, strict=True))
        if math.prod(mesh.values()) == num_devices:
            yield mesh


def _ulysses_degree(config: Config, mesh: dict[str, int]) -> list[int]:
    """Ways to cut context for hybrid, best first: the most ranks with key/value heads of their own, then the fewest
    that must repeat some. All of context would be ulysses, and none of it ring."""
    kv_heads = max(1, config.model.num_kv_heads // mesh[TENSOR])
    heads = config.model.num_heads // mesh[TENSOR]
    cuts = [ranks for ranks in range(2, mesh[CONTEXT]) if mesh[CONTEXT] % ranks == 0 and heads % ranks == 0]
    own = [ranks for ranks in cuts if kv_heads % ranks == 0]
    return own[::-1] + [ranks for ranks in cuts if ranks % kv_heads == 0 and ranks not in own]


def _batch(config: Config, replicas: int) -> dict[str, int]:
    """As many rows at a time for each replica as in the config; evaluation needs some for each."""
    train = config.train
    rows_at_a_time = max(
        1, train.global_batch_size // (train.gradient_accumulation_steps * config.mesh.data * config.mesh.fsdp)
    )
    return {
        "train.gradient_accumulation_steps": max(1, train.global_batch_size // (rows_at_a_time * replicas)),
        "train.eval_sequences": math.ceil(train.eval_sequences / replicas) * replicas,
    }


def _point(config: Config, settings: dict[str, Setting], num_devices: int) -> Point:
    also = transport_settings(settings["runtime.transport"])
    if config.runtime.simulated_devices:
        also["runtime.simulated_devices"] = num_devices
    try:
        return Point(settings=settings, config=with_settings(config, settings | also))
    except UserError as error:
        return Point(settings=settings, config=None, refusal=str(error))
