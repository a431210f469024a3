"""Settings of the given config that cost much time, by the formulas: a mask with a slower kernel, a small tile."""

from collections.abc import Iterator
from typing import Any

from jaxlc.config import Config, with_settings
from jaxlc.core.errors import UserError
from jaxlc.search.candidates import KernelsOf
from jaxlc.search.time_formula import estimate_time
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.topology import Topology

_LEAST_COST = 0.02  # smaller shares of the time are not reported
# Settings that are changed together, because one of them alone may be invalid.
_GROUPS = (
    ("memory.tile_tokens",),
    ("memory.remat", "memory.offload", "memory.save", "memory.layers_per_remat_group"),
    ("memory.optimizer",),
    ("memory.parameters",),
    ("attention.strategy", "attention.ulysses_degree"),
)


def costly_settings(given: Config, recommended: Config, gpus: Topology, roofline: Roofline) -> list[str]:
    """Sentences, one for each setting.

    Args:
      given: the config of the command line; its mesh may be of another size than `gpus`.
      recommended: the best config for `gpus`.
    """
    return [*_semantic(recommended, gpus, roofline), *_given(given, recommended, gpus, roofline)]


def _semantic(config: Config, gpus: Topology, roofline: Roofline) -> Iterator[str]:
    """Settings that a recommendation does not change, because results would differ."""
    kernels_of = KernelsOf(gpus)
    changes = [("attention.document_mask", False, "tokens would attend to earlier documents of their sequence")]
    if config.attention.kernel != "auto":
        changes.append(("attention.kernel", "auto", "the fastest supported kernel"))
    for path, value, meaning in changes:
        if _value(config, path) == value:
            continue
        other = with_settings(config, {path: value})
        cost = _cost(config, other, gpus, roofline)
        if cost >= _LEAST_COST:
            kernels = [", ".join(dict.fromkeys((kernels_of(x) or {}).values())) for x in (config, other)]
            yield (
                f"  {path}={_value(config, path)} costs {cost:.1%}: kernel {kernels[0]}; with {value} it would be"
                f" {kernels[1]} ({meaning})"
            )


def _given(given: Config, recommended: Config, gpus: Topology, roofline: Roofline) -> Iterator[str]:
    if given.mesh.num_devices != gpus.num_gpus or given.mesh.num_devices == 1 == recommended.mesh.num_devices:
        return
    cost = _cost(given, recommended, gpus, roofline)
    if cost >= _LEAST_COST:
        yield f"  the given mesh and settings together: {cost:.1%} slower than the first"
    for group in _GROUPS:
        changed = {
            path: _value(recommended, path) for path in group if _value(recommended, path) != _value(given, path)
        }
        if not changed:
            continue
        try:
            other = with_settings(given, changed)
        except UserError:
            continue
        cost = _cost(given, other, gpus, roofline)
        if cost >= _LEAST_COST:
            texts = " ".join(f"{path}={_text(_value(given, path))}" for path in changed)
            instead = " ".join(f"{path}={_text(value)}" for path, value in changed.items())
            yield f"  {texts} costs {cost:.1%} (recommended: {instead})"


def _cost(config: Config, other: Config, gpus: Topology, roofline: Roofline) -> float:
    """Additional time of `config` as a fraction of that of `other`; 0 if a kernel is unsupported."""
    kernels_of = KernelsOf(gpus)
    kernels = [kernels_of(x) for x in (config, other)]
    if None in kernels:
        return 0.0
    seconds, least = (
        estimate_time(x, gpus, roofline, kernel).step_seconds for x, kernel in zip((config, other), kernels)
    )
    return seconds / least - 1


def _value(config: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _text(value: Any) -> str:
    return ",".join(value) or "none" if isinstance(value, tuple) else str(value)
