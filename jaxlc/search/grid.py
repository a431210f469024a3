"""The grid of a sweep: meshes combined with attention strategies, remat policies, sequence lengths and transports.

Imports no jax: the leading process of a sweep leaves the devices to the workers that measure.
"""

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from jaxlc.config import Config, transport_settings, with_settings
from jaxlc.config.setting_paths import hint_at
from jaxlc.config.values import Tokens, typed
from jaxlc.core.axes import CONTEXT, FSDP, MESH_AXES, TENSOR, mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.suggestions import did_you_mean
from jaxlc.search import space
from jaxlc.search.space import Settings


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values to combine. A mesh axis that is not in `axes` keeps the size it has in the config."""

    axes: tuple[str, ...]
    strategies: tuple[str, ...]
    remats: tuple[str, ...]
    seq_lens: tuple[int, ...]  # tokens
    transports: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration of the sweep, or the reason why the config checks reject it."""

    settings: Settings  # key -> value: "mesh.context" -> 8
    config: Config | None  # None if rejected
    refusal: str = ""

    @property
    def overrides(self) -> str:
        """Command-line flags that turn the sweep's config into this point."""
        return space.overrides(self.settings)

    def columns(self) -> Settings:
        """The settings by field name, without the section: "context" -> 8."""
        return {key.rpartition(".")[2]: value for key, value in self.settings.items()}


def parse_grid(
    config: Config,
    *,
    axes: str | None = None,
    strategies: str | None = None,
    remat: str | None = None,
    seq_len: str | None = None,
    transports: str | None = None,
) -> Grid:
    """Parses comma-separated flag values.

    None selects the value in `config`; for `axes` it selects all axes but data.

    Raises:
      UserError: an unknown name, or an invalid sequence length.
    """
    lengths = [typed("--seq_len", text, Tokens) for text in seq_len.split(",")] if seq_len else [config.data.seq_len]
    return Grid(
        axes=_names(axes or f"{CONTEXT},{TENSOR},{FSDP}", MESH_AXES, "axes"),
        strategies=_names(strategies or config.attention.strategy, _choices("attention", "strategy"), "strategies"),
        remats=_names(remat or config.memory.remat, _choices("memory", "remat"), "remat"),
        seq_lens=tuple(dict.fromkeys(lengths)),
        transports=_names(transports or config.runtime.transport, _choices("runtime", "transport"), "transports"),
    )


def points(config: Config, num_devices: int, grid: Grid) -> tuple[list[Point], int]:
    """Returns all points, rejected ones included, and the number of duplicate combinations that are skipped.

    With context=1 all strategies compile to the same program, so only the first is kept. Hybrid is skipped where
    context has no divisor that splits it into an all-to-all group and a ring: it would equal ulysses or ring. The
    global batch size is that of `config`. Gradient accumulation steps follow from the number of replicas, so that the
    microbatch per replica stays the same.

    Raises:
      UserError: no mesh of these axes has `num_devices` devices, or none of them splits context for hybrid.
    """
    meshes = list(space.meshes(config, num_devices, grid.axes))
    if not meshes:
        fixed = mesh_text({axis: size for axis, size in vars(config.mesh).items() if axis not in grid.axes})
        raise UserError(
            f"no mesh of {num_devices} devices: --axes={','.join(grid.axes)} cannot complete {fixed};"
            " add axes to --axes"
        )
    points, num_duplicates = [], 0
    combinations = product(grid.seq_lens, grid.transports, grid.remats, meshes, grid.strategies)
    for seq_len, transport, remat, mesh, strategy in combinations:
        is_duplicate = mesh[CONTEXT] == 1 and strategy != grid.strategies[0]
        degrees = [1] if strategy != "hybrid" or mesh[CONTEXT] == 1 else space.ulysses_degrees(config, mesh)
        if is_duplicate or not degrees:
            num_duplicates += 1
            continue
        settings = space.mesh_settings(mesh, strategy, degrees[0]) | {
            "memory.remat": remat,
            "data.seq_len": seq_len,
            "runtime.transport": transport,
            **space.batch_settings(config, mesh, _sequences_per_replica(config)),
        }
        points.append(_point(config, settings, num_devices))
    if not points:
        raise UserError(
            "no points: hybrid needs a context axis that splits into Ulysses ranks and a ring, such as context=4, and a"
            " Ulysses degree that divides the heads; add axes to --axes, or strategies to --strategies"
        )
    return points, num_duplicates


def _names(text: str, known: Sequence[str], flag: str) -> tuple[str, ...]:
    """ "a,b" -> ("a", "b"). Raises UserError for a name that is not in `known`."""
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            raise UserError(f"invalid {name!r} for --{flag}: {did_you_mean(name, known)}")
    return names


def _choices(section: str, name: str) -> tuple[str, ...]:
    return typing.get_args(hint_at(f"{section}.{name}"))


def _sequences_per_replica(config: Config) -> int:
    """Sequences of a microbatch on one replica of the given mesh."""
    train, replicas = config.train, config.mesh.data * config.mesh.fsdp
    return max(1, train.global_batch_size // (train.gradient_accumulation_steps * replicas))


def _point(config: Config, settings: Settings, num_devices: int) -> Point:
    also = transport_settings(settings["runtime.transport"])
    if config.runtime.simulated_devices:
        also["runtime.simulated_devices"] = num_devices
    try:
        return Point(settings=settings, config=with_settings(config, settings | also))
    except UserError as error:
        return Point(settings=settings, config=None, refusal=str(error))
