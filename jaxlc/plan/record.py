"""The values of a plan as plain data, and their JSON with stable keys."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.hlo.memory_dump import LiveTensor
from jaxlc.plan.memory import Memory
from jaxlc.plan.packing_estimates import PackingEstimate, PackingEstimates
from jaxlc.plan.summary import CollectiveStats, Ring
from jaxlc.simulate.layer_timeline import LayerEvent
from jaxlc.simulate.timeline import Prediction

DERIVED_MEMORY = (
    "symmetric_bytes",
    "device_peak_bytes",
    "pool_share",
    "fits",
)  # of the JSON only


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which the step was compiled again."""

    overrides: str  # command-line flags: "--config.memory.remat=full"
    cost: str  # in time, as text
    device_peak_bytes: int  # as in memory
    host_bytes_per_node: int  # as in memory
    fits: bool  # device and host memory


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanRecord:
    """A training step compiled ahead of time. Bytes are per GPU, counts per optimizer step."""

    topology: str  # NVLink domains x GPUs per domain: "h100:8x8"
    num_devices: int  # GPUs of the topology
    mesh: dict[str, int]  # size of each mesh axis
    sequence_tokens: int  # data.seq_len
    tokens_per_step: int  # over all GPUs, padding included
    compile_seconds: float  # on this machine, for the step
    predicted: Prediction
    memory: Memory
    collectives: tuple[CollectiveStats, ...]
    ring: Ring
    kernels: dict[str, int]  # executions by name: attention kernels by pass, matrix products, library calls
    kernel_choice: str  # the attention kernel, and why it was selected
    transport_choice: str  # the transport of attention's collective permutes, and why it was selected
    hints: tuple[str, ...] = ()  # settings that may make the step faster
    advice: tuple[Change, ...] | None = None  # None: not requested
    config: dict[str, dict[str, Any]] = field(default_factory=dict)  # the sections that shape the step
    layer_timeline: tuple[LayerEvent, ...] = ()  # simulated, of one layer
    evaluation_peak_bytes: int | None = None  # on the device, with the training state; None: not compiled
    packing: PackingEstimates | None = None  # for packed sequences; None: not requested

    @property
    def title(self) -> str:
        """Model, sequence length, mesh and topology in one line."""
        axes = mesh_text({axis: size for axis, size in self.mesh.items() if size > 1})
        model = self.config.get("model", {}).get("preset", "")
        target = f"{self.topology}, {axes}" if axes else self.topology
        return f"{model + ', ' if model else ''}{self.sequence_tokens:,} tokens on {target}"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        values = dataclasses.asdict(self)
        values["memory"] |= {name: getattr(self.memory, name) for name in DERIVED_MEMORY}
        values["memory"]["largest"] = [tensor._asdict() for tensor in self.memory.largest]
        values["collectives"] = [stats._asdict() | {"axes": list(stats.axes)} for stats in self.collectives]
        values["layer_timeline"] = [event._asdict() for event in self.layer_timeline]
        return values

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | Path) -> Self:
        """The plan that `to_json` returned or `jaxlc plan --json` wrote.

        Args:
          source: the values, or the path of a JSON file. Unknown keys are ignored.
        Raises:
          UserError: the file cannot be read, or is not a plan.
        """
        values, name = (source, "the values") if isinstance(source, Mapping) else (_read(Path(source)), str(source))
        try:
            memory = dict(values["memory"])
            memory["largest"] = tuple(_construct(LiveTensor, tensor) for tensor in memory["largest"])
            collectives = ({**stats, "axes": tuple(stats["axes"])} for stats in values["collectives"])
            advice, predicted = values["advice"], values["predicted"]
            interval = tuple(predicted["step_seconds_interval"])
            parts = dict(
                predicted=_construct(Prediction, {**predicted, "step_seconds_interval": interval}),
                memory=_construct(Memory, memory),
                collectives=tuple(_construct(CollectiveStats, stats) for stats in collectives),
                ring=_construct(Ring, values["ring"]),
                hints=tuple(values["hints"]),
                advice=None if advice is None else tuple(_construct(Change, change) for change in advice),
                layer_timeline=tuple(_construct(LayerEvent, event) for event in values["layer_timeline"]),
                packing=_packing(values["packing"]),
            )
            return _construct(cls, {**values, **parts})
        except (KeyError, TypeError) as error:
            raise UserError(f"invalid plan: {name} cannot be read ({error}); write it again with --json") from error


def _packing(values: Mapping[str, Any] | None) -> PackingEstimates | None:
    if values is None:
        return None
    estimates = tuple(_construct(PackingEstimate, estimate) for estimate in values["estimates"])
    return _construct(PackingEstimates, {**values, "estimates": estimates})


def _read(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read the plan {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise UserError(f"invalid plan: {path} contains no JSON object; write it again with --json")
    return values


def _construct(kind: type, values: Mapping[str, Any]) -> Any:
    """An instance of a dataclass or NamedTuple from its fields in `values`. Raises TypeError if one is missing."""
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    return kind(**{name: values[name] for name in names if name in values})
