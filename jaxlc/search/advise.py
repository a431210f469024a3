"""Advice for a step that does not fit: the search over settings of memory only, for its mesh and strategy."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ml_collections import ConfigDict

from jaxlc.config import Config
from jaxlc.core.errors import UserError
from jaxlc.plan.compile import on_gpus, plan_step
from jaxlc.plan.record import Change
from jaxlc.plan.result import Plan
from jaxlc.runtime.worker_processes import Row
from jaxlc.search import space
from jaxlc.search.best_first import Candidate, Search
from jaxlc.search.compile_order import Layout, Rates
from jaxlc.search.runner import IsOver
from jaxlc.search.worker import row_of
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.time_model import DEFAULT_ROOFLINE
from jaxlc.simulate.topology import Topology

_NUM_FITTING = 2  # the search ends after this many changes that fit; later ones cost more time
_NUM_COMPILED = 6  # or after this many changes


def with_advice(
    plan: Plan,
    config: ConfigDict | Config,
    gpus: Topology,
    starting: Callable[[str], None],
    roofline: Roofline = DEFAULT_ROOFLINE,
) -> Plan:
    """The plan of `config`, whose step does not fit, with changes that were compiled.

    Args:
      starting: called with a description of each program before it is compiled.
    """
    config = on_gpus(config, gpus)
    given, *changes = _candidates(config, gpus, roofline)
    search = Search("fastest", changes)
    search.add(given, _row(given, plan))
    advice: list[Change] = []

    def compile_one(candidates: Sequence[Candidate], _is_over: IsOver) -> list[Row]:
        (candidate,) = candidates
        overrides = candidate.overrides
        try:
            result = plan_step(candidate.checked(), gpus, lambda: starting(f"with {overrides}"), roofline=roofline)
        except UserError as error:  # invalid for this config, or refused by the compiler
            return [dict(status="refused", reason=str(error))]
        advice.append(Change(
            overrides=overrides,
            cost=space.cost(config, candidate.settings),
            device_peak_bytes=result.memory.device_peak_bytes,
            host_bytes_per_node=result.memory.host_bytes_per_node,
            fits=result.memory.fits,
        ))  # fmt: skip
        return [_row(candidate, result)]

    search.run(
        compile_one, lambda _: len(advice) >= _NUM_COMPILED or sum(change.fits for change in advice) >= _NUM_FITTING
    )
    return dataclasses.replace(plan, advice=tuple(advice))


def _candidates(config: Config, gpus: Topology, roofline: Roofline) -> Iterator[Candidate]:
    """`config` itself, then its changes."""
    rates, layouts = Rates(gpus, roofline), {}
    for settings in ({}, *space.changes(config)):
        changed = space.unchecked(config, settings)
        steps = changed.train.gradient_accumulation_steps
        if steps not in layouts:
            layouts[steps] = Layout(changed, rates, rates.kernels(changed) or {})
        estimate = layouts[steps].estimate(changed.memory)
        yield Candidate(settings=settings, base=config, gpus=gpus, estimate=estimate)


def _row(candidate: Candidate, plan: Plan) -> Row:
    config = candidate.config
    columns = dict(topology=str(candidate.gpus), seq_len=config.data.seq_len, **vars(config.mesh))
    steps = config.train.gradient_accumulation_steps
    return row_of(plan, config) | columns | dict(status="done", gradient_accumulation_steps=steps)
