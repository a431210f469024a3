"""The values of a plan as plain data, and their JSON with stable keys."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any, Self

from jaxlc.config.models.model_schema import model_name
from jaxlc.core.axes import mesh_text
from jaxlc.core.errors import UserError
from jaxlc.core.files import read_json_file
from jaxlc.generation.memory import GenerationMemory
from jaxlc.hlo.memory_dump import Launches
from jaxlc.plan.memory import Memory
from jaxlc.plan.packing_estimates import PackingEstimates
from jaxlc.plan.summary import CollectiveStats, Ring
from jaxlc.simulate.layer_timeline import LayerEvent
from jaxlc.simulate.timeline import Prediction

DERIVED_MEMORY = (
    "symmetric_bytes",
    "device_peak_bytes",
    "pool_share",
    "fits",
)  # only in the JSON


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings with which the step was compiled again."""

    overrides: str  # command-line flags: "--config.memory.remat=full"
    cost: str  # in time, as text
    device_peak_bytes: int  # as in memory
    host_bytes_per_node: int  # as in memory
    fits: bool  # device and host memory


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """The forward pass of the reference model of posttrain.reference=model, before each step."""

    seconds: float  # estimated; not in predicted.step_seconds
    peak_bytes: int  # on the device, with the training state
    host_bytes: int  # its weights in pinned host memory, in memory.host_bytes_per_device too


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
    launches: Launches | None = None  # how the step runs; None: in a plan of an earlier version
    hints: tuple[str, ...] = ()  # settings that may make the step faster
    context_warning: str = ""  # the sequence is longer than the context of the model; "": it is not
    advice: tuple[Change, ...] | None = None  # None: not requested
    config: dict[str, dict[str, Any]] = field(default_factory=dict)  # the sections that shape the step
    layer_timeline: tuple[LayerEvent, ...] = ()  # simulated, of one layer
    evaluation_peak_bytes: int | None = None  # on the device, with the training state; None: not compiled
    rollouts: GenerationMemory | None = None  # beside the training state; None: config.rollouts.source is not "model"
    reference: ReferencePass | None = None  # None: the loss needs no weights of a reference model
    packing: PackingEstimates | None = None  # for packed sequences; None: not requested

    @property
    def model(self) -> str:
        """The name of the model; "" if the plan does not have it."""
        return model_name(self.config.get("model", {}))

    @property
    def title(self) -> str:
        """Model, sequence length, mesh and topology in one line."""
        axes = mesh_text({axis: size for axis, size in self.mesh.items() if size > 1})
        target = f"{self.topology}, {axes}" if axes else self.topology
        return f"{self.model + ', ' if self.model else ''}{self.sequence_tokens:,} tokens on {target}"

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        values = dataclasses.asdict(self)
        values["memory"] |= {name: getattr(self.memory, name) for name in DERIVED_MEMORY}
        values["memory"]["largest"] = [tensor._asdict() for tensor in self.memory.largest]
        values["launches"] = self.launches and self.launches._asdict()
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
        values, name = (
            (source, "the values") if isinstance(source, Mapping) else (read_plan_file(Path(source)), str(source))
        )
        try:
            return _construct(cls, values)
        except (AttributeError, TypeError) as error:
            raise UserError(f"invalid plan: {name} cannot be read ({error}); write it again with --json") from error


def read_plan_file(path: Path) -> Mapping[str, Any]:
    try:
        values = read_json_file(path)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the plan {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise UserError(f"invalid plan: {path} contains no JSON object; write it again with --json")
    return values


def _construct(hint: Any, value: Any) -> Any:
    """`value`, plain JSON types, as the type `hint`.

    Raises:
      TypeError: a dataclass or NamedTuple lacks a field.
      AttributeError, TypeError: a value has another type.
    """
    if value is not None and isinstance(hint, UnionType):  # T | None
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is tuple:
        return tuple(_construct(typing.get_args(hint)[0], item) for item in value)
    if isinstance(hint, type) and (hints := typing.get_type_hints(hint)):
        return hint(**{name: _construct(hints[name], item) for name, item in value.items() if name in hints})
    if typing.get_origin(hint) is dict:
        return {name: _construct(typing.get_args(hint)[1], item) for name, item in value.items()}
    expected = {int: int, float: (int, float), str: str, bool: bool}.get(hint)
    if expected and (not isinstance(value, expected) or isinstance(value, bool) is not (hint is bool)):
        raise TypeError(f"{value!r:.40} is no {hint.__name__}")
    return value
