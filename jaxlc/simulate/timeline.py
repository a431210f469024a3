"""How long a compiled step takes, predicted: a walk over its schedule with a model of time. No GPU has confirmed it.

Kernels run one after the other, in the schedule's order: attention and matrix products by the rate that their kind
reaches, or by the bytes they move if that takes longer; all else by its bytes (`jaxlc.hlo.kernel_costs`). Collectives
and
copies to and from the host start where the schedule starts them, run beside the kernels, and the kernels wait where the
schedule ends them: that wait is what is exposed. Transfers under way on one link share it evenly.

A loop is walked round by round while something that began before it is under way. After that all its rounds are alike:
one is walked, and counted as often as it runs. Of a conditional the longest branch counts.

Left out: that collectives take multiprocessors and memory bandwidth from kernels, clocks that fall under load, ranks
that wait for slower ones, input, and the host's own time. A mask's work is that of rows of one document, in halves.
A step that does not fit the GPU's memory has a schedule that saves memory and hides less, and is predicted from that.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from jaxlc.config import Config
from jaxlc.hlo import Program
from jaxlc.hlo.parser import Computation, Instruction
from jaxlc.hlo.trip_counts import trip_count
from jaxlc.simulate.roofline import Roofline
from jaxlc.simulate.timed_ops import LINKS, Kernel, Step, TimedOps
from jaxlc.simulate.topology import Topology

DEFAULT_RATES = Roofline()
_COMMUNICATION = ("NVLink", "network")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of one optimizer step. All seconds are modelled, not measured."""

    step_seconds: float
    tokens_per_second_per_device: float
    mfu_causal: float  # model FLOPs, causal (jaxlc.core.flops), over the bf16 peak of all devices
    recomputed_share: float  # FLOPs of the program beyond the model's, over the model's; attention's own included
    exposed_communication_seconds: float  # in which kernels wait for collectives
    communication_seconds: float  # of all collectives, were each alone on its link
    exposed_host_copy_seconds: float  # in which kernels wait for copies to or from the host
    host_copy_seconds: float  # of all of them, were each alone on its way
    host_copies: int
    exposed_host_copies: int  # those that kernels wait for
    bound_by: str  # what most of the step's time goes to: a key of seconds_by_resource
    seconds_by_resource: dict[str, float]  # "compute", "HBM", and waiting for "NVLink", "network", "host"
    seconds_by_kind: dict[str, float]  # "attention", "matrix products", "other kernels", "waiting"


class Event(NamedTuple):
    """Something on a lane of the timeline."""

    lane: str  # "kernels", or a link
    kind: str  # of the kernel; of a transfer, its operation
    start_seconds: float
    end_seconds: float


def predict(program: Program, gpus: Topology, config: Config, rates: Roofline = DEFAULT_RATES) -> Prediction:
    """The time of one run of `program`, the training step of `config` compiled for `gpus`.

    Raises:
      ValueError: the program is not scheduled, or has a loop whose number of rounds is not known.
    """
    walk = Simulator(TimedOps(program, gpus, config, rates))
    walk.run(program.entry)
    flops = config.flops_per_step
    by_resource, by_kind = Counter(), Counter()
    for (kind, resource), seconds in walk.spent.items():
        by_resource[resource] += seconds
        by_kind[kind] += seconds
    return Prediction(
        step_seconds=walk.now,
        tokens_per_second_per_device=config.tokens_per_step / walk.now / gpus.num_gpus,
        recomputed_share=walk.flops * gpus.num_gpus / flops - 1,
        mfu_causal=flops / (walk.now * gpus.num_gpus * gpus.device.bf16_flops_per_second),
        exposed_communication_seconds=sum(by_resource[link] for link in _COMMUNICATION),
        communication_seconds=sum(walk.sent[link] for link in _COMMUNICATION),
        exposed_host_copy_seconds=by_resource["host"],
        host_copy_seconds=walk.sent["host"],
        host_copies=walk.transfers["host"],
        exposed_host_copies=walk.exposed["host"],
        bound_by=max(by_resource, key=by_resource.get),
        seconds_by_resource=dict(by_resource.most_common()),
        seconds_by_kind=dict(by_kind.most_common()),
    )


def events(
    program: Program, gpus: Topology, config: Config, computation: Computation, rates: Roofline = DEFAULT_RATES
) -> list[Event]:
    """What happens in one run of `computation`, in the order in which it ends."""
    walk = Simulator(TimedOps(program, gpus, config, rates), events=[])
    walk.run(computation)
    return walk.events


class Simulator:
    """The clock, the links, and what the time went to."""

    def __init__(
        self, tasks: TimedOps, rounds: dict[str, "Simulator"] | None = None, events: list[Event] | None = None
    ):
        self.tasks = tasks
        self.now = 0.0
        self.flops = 0.0  # of attention and matrix products
        self.spent: Counter[tuple[str, str]] = Counter()  # by kind and resource; the sum is `now`
        self.sent: Counter[str] = Counter()  # seconds of transfers alone, by resource
        self.transfers: Counter[str] = Counter()  # how many, by resource
        self.exposed: Counter[str] = Counter()  # of them, those that kernels wait for
        self.events = events
        self._links = {name: _Link() for name in LINKS}
        self._rounds = {} if rounds is None else rounds  # one round of each loop body, from idle links

    def run(self, computation: Computation) -> None:
        steps = self.tasks.of(computation)
        for step in steps:
            self._run_step(step)

    def _run_step(self, step: Step) -> None:
        if step.kernel is not None:
            self._run_kernel(step.kernel)
        if step.starts is not None:
            link, seconds = step.starts.link, step.starts.seconds
            self.sent[LINKS[link]] += seconds
            self.transfers[LINKS[link]] += 1
            self._links[link].begin(step.starts.start, seconds, self.now)
        if step.awaits is not None:
            self._await(step.awaits.start, step.awaits.link)
        if step.loop is not None:
            self._run_loop(step.loop)
        if step.branches:
            self.run(max(step.branches, key=lambda each: self._alone(each).now))

    def _run_kernel(self, kernel: Kernel) -> None:
        self._note("kernels", kernel.kind, self.now, self.now + kernel.seconds)
        self.spent[kernel.kind, kernel.resource] += kernel.seconds
        self.flops += kernel.flops
        self._pass(kernel.seconds)

    def _await(self, start: Instruction, link: str) -> None:
        seconds = self._links[link].seconds_until_done(start)
        self.spent["waiting", LINKS[link]] += seconds
        self.exposed[LINKS[link]] += seconds > _DUST_SECONDS
        self._pass(seconds)

    def _run_loop(self, loop: Instruction) -> None:
        body = self.tasks.program.computations[loop.attributes["body"].lstrip("%")]
        left = trip_count(self.tasks.program, loop)
        while left and (self.events is not None or any(link.underway for link in self._links.values())):
            self.run(body)
            left -= 1
        if left:
            self._repeat(self._alone(body), left)

    def _repeat(self, round_: "Simulator", times: int) -> None:
        self.now += times * round_.now
        self.flops += times * round_.flops
        for name in ("spent", "sent", "transfers", "exposed"):
            mine, its = getattr(self, name), getattr(round_, name)
            for key, value in its.items():
                mine[key] += times * value

    def _alone(self, computation: Computation) -> "Simulator":
        """One run of a computation with nothing else under way."""
        if computation.name not in self._rounds:
            walk = self._rounds[computation.name] = Simulator(self.tasks, self._rounds)
            walk.run(computation)
        return self._rounds[computation.name]

    def _pass(self, seconds: float) -> None:
        for name, link in self._links.items():
            for transfer, began, ended in link.advance(seconds, self.now):
                self._note(name, transfer.opcode, began, ended)
        self.now += seconds

    def _note(self, lane: str, kind: str, start: float, end: float) -> None:
        if self.events is not None:
            self.events.append(Event(lane, kind, start, end))


class _Link:
    """Transfers under way, each with the seconds it would still take alone. They share the link evenly."""

    def __init__(self):
        self.underway: dict[Instruction, float] = {}
        self._began: dict[Instruction, float] = {}

    def begin(self, start: Instruction, seconds: float, now: float) -> None:
        self.underway[start], self._began[start] = seconds, now

    def seconds_until_done(self, start: Instruction) -> float:
        """If nothing else begins: of each other transfer, as much as `start` itself needs passes beside it."""
        needed = self.underway.get(start, 0.0)
        return sum(min(needed, seconds) for seconds in self.underway.values())

    def advance(self, seconds: float, now: float) -> list[tuple[Instruction, float, float]]:
        """Lets `seconds` pass. Returns what has ended, with its begin and end."""
        ended = []
        while self.underway:
            first = min(self.underway, key=self.underway.get)
            share = min(self.underway[first], seconds / len(self.underway))
            seconds -= share * len(self.underway)
            now += share * len(self.underway)
            self.underway = {each: left - share for each, left in self.underway.items()}
            if self.underway[first] > _DUST_SECONDS:
                break
            del self.underway[first]
            ended.append((first, self._began.pop(first), now))
        return ended


_DUST_SECONDS = 1e-15  # what rounding leaves of a transfer that has ended
