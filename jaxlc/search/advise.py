"""Advice for a step that does not fit: the search over settings of memory only, for its mesh and strategy."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from ml_collections import ConfigDict

from jaxlc.config import Config, with_settings
from jaxlc.core.errors import UserError
from jaxlc.plan.compile import on_gpus, plan_step
from jaxlc.plan.memory import Memory
from jaxlc.plan.record import Change
from jaxlc.plan.result import Plan
from jaxlc.search import space
from jaxlc.search.compile_order import Estimate, Layout, Rates
from jaxlc.search.space import Settings
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE
from jaxlc.simulate.topology import Topology

_NUM_FITTING = 2  # the search ends after this many changes that fit; later ones cost more time
_NUM_COMPILED = 6  # or after this many changes
_MARGIN = 0.95  # of estimated working memory: what exceeds the memory by less is compiled
_EQUAL = 0.01  # relative difference of estimated time below which fewer changed settings come first


def plan_with_advice(
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[str], None],
    roofline: Roofline = DEFAULT_ROOFLINE,
    **options,
) -> Plan:
    """The plan of `config`, with advice if it does not fit; see `compile.plan_step`.

    Args:
      starting: called with a description of each program before it is compiled.
      options: further arguments of `compile.plan_step` for `config` itself.
    """
    config = on_gpus(config, gpus)
    plan = plan_step(config, gpus, lambda: starting(f"the training step for {gpus}"), roofline=roofline, **options)
    if plan.memory.fits:
        return plan
    options_left, ratios = _estimates(config, gpus, roofline), []
    given = options_left.pop("")[1]
    ratios.append(_working_ratio(given, plan.memory))
    advice: list[Change] = []
    while len(advice) < _NUM_COMPILED and sum(change.fits for change in advice) < _NUM_FITTING:
        overrides = _next(options_left, gpus, statistics.median(ratios), [x.overrides for x in advice if x.fits])
        if overrides is None:
            break
        settings, estimate = options_left.pop(overrides)
        try:
            changed = with_settings(config, settings)
            memory = plan_step(changed, gpus, lambda text=overrides: starting(f"with {text}")).memory
        except UserError:  # invalid for this config, or refused by the compiler
            continue
        ratios.append(_working_ratio(estimate, memory))
        advice.append(Change(
            overrides=overrides,
            cost=space.cost(config, settings),
            device_peak_bytes=memory.device_peak_bytes,
            host_bytes_per_node=memory.host_bytes_per_node,
            fits=memory.fits,
        ))  # fmt: skip
    return dataclasses.replace(plan, advice=tuple(advice))


def _estimates(config: Config, gpus: Topology, roofline: Roofline) -> dict[str, tuple[Settings, Estimate]]:
    """Changes of `config` by their overrides; "": none."""
    rates, layouts = Rates(gpus, roofline), {}
    result = {}
    for settings in ({}, *space.changes(config)):
        changed = space.unchecked(config, settings)
        steps = changed.train.gradient_accumulation_steps
        if steps not in layouts:
            layouts[steps] = Layout(changed, rates, rates.kernels(changed) or {})
        result[space.overrides(settings)] = (settings, layouts[steps].estimate(changed.memory))
    return result


def _working_ratio(estimate: Estimate, memory: Memory) -> float:
    return (memory.device_peak_bytes - estimate.exact_bytes) / estimate.working_bytes


def _next(
    options: Mapping[str, tuple[Settings, Estimate]], gpus: Topology, working_ratio: float, fitting: Sequence[str]
) -> str | None:
    """The fastest change that is expected to fit, of equal ones the smallest; without parts that fit on their own."""

    def place(overrides: str) -> tuple[int, int, float]:
        settings, estimate = options[overrides]
        return round(math.log(estimate.step_seconds) / _EQUAL), len(settings), estimate.step_seconds

    expected = (
        overrides
        for overrides, (_, estimate) in options.items()
        if estimate.fits(gpus, _MARGIN * working_ratio)
        and not any({*known.split()} <= {*overrides.split()} for known in fitting)
    )
    return min(expected, key=place, default=None)
