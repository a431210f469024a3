"""The estimate that a trace is compared with: of the compiled step that was traced, or of a stored plan."""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxlc.config import from_dict
from jaxlc.core import hardware
from jaxlc.core.errors import UserError
from jaxlc.core.files import read_json_file
from jaxlc.core.flops import document_pairs
from jaxlc.hlo import AnalyzedProgram, analyze
from jaxlc.plan.record import PlanRecord
from jaxlc.simulate import timeline
from jaxlc.simulate.packed_work import one_document
from jaxlc.simulate.roofline import from_file
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import Prediction
from jaxlc.simulate.topology import Topology, topology
from jaxlc.train.callbacks import PAIRS, PROGRAM_FILE, RUN_FILE

_MAX_PROGRAM_BYTES = 1 << 30  # uncompressed
_PARENTS = 4  # the trace is in plugins/profile/DATE/ of the directory with the program
_GPUS_PER_DOMAIN = {"gb200": 64}  # assumed, as are 8 of all others


@dataclass(frozen=True, kw_only=True)
class TracedRun:
    """What `StepProfiler` wrote next to the trace; None where it did not, as for traces of other programs."""

    program: AnalyzedProgram | None = None
    about: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    prediction: Prediction
    model: TimeModel | None  # for single ring steps; None for a stored plan
    pairs_share: float = 1.0  # see `Comparison.estimated_pairs_share`


def read_run(trace: Path) -> TracedRun:
    """The program and the config of the traced run, from a parent directory of the trace file.

    Raises:
      UserError: a file is damaged.
    """
    for directory in list(trace.absolute().parents)[:_PARENTS]:
        program, about = directory / PROGRAM_FILE, directory / RUN_FILE
        if program.exists() and about.exists():
            try:
                with gzip.open(program) as file:
                    text = file.read(_MAX_PROGRAM_BYTES + 1)
                if len(text) > _MAX_PROGRAM_BYTES:
                    raise ValueError(f"the program has more than {_MAX_PROGRAM_BYTES:,} bytes")
                return TracedRun(program=analyze(text.decode()), about=_checked(read_json_file(about)))
            except (OSError, EOFError, ValueError, zlib.error) as error:
                raise UserError(f"cannot read {program} and {about.name}: {error}; trace the steps again") from error
    return TracedRun()


def _checked(about: Any) -> dict[str, Any]:
    types = dict(config=dict, num_devices=int, device_kind=str)
    pairs = about.get(PAIRS, 0) if isinstance(about, dict) else None
    if pairs is None or not all(isinstance(about.get(name), kind) for name, kind in types.items()):
        raise ValueError(f"expected a JSON object with {', '.join(types)}")
    return about


def predict(run: TracedRun, *, plan: str, topology_name: str, constants: str) -> Estimate | None:
    """The estimate of a plan, or of the traced program; None if there is neither, or if the GPUs are unknown.

    Raises:
      UserError: an invalid plan, topology or constants file.
    """
    if plan:
        return Estimate(prediction=PlanRecord.from_json(plan).predicted, model=None)
    roofline = from_file(constants)
    if run.program is None or run.about is None:
        return None
    config = from_dict(run.about["config"])
    gpus = _gpus(run.about, topology_name, config.runtime.topology)
    if gpus is None:
        return None
    whole = config.train.global_batch_size * document_pairs(config.model, [config.data.seq_len])
    share = run.about.get(PAIRS, whole) / whole if whole else 1.0
    model = TimeModel(gpus, config, roofline, one_document(config, share))
    return Estimate(prediction=timeline.predict(run.program, model), model=model, pairs_share=share)


def _gpus(about: dict[str, Any], requested: str, configured: str) -> Topology | None:
    """The GPUs of the run; None if they are not listed in core/hardware.py, as CPUs.

    Args:
      requested: a topology, or "".
      configured: config.runtime.topology, which counts if it is of the run's GPUs.
    Raises:
      UserError: an invalid `requested`, or one of another size.
    """
    num_devices = about["num_devices"]
    if requested:
        gpus = topology(requested)
        if gpus.num_gpus != num_devices:
            raise UserError(f"--topology={gpus} has {gpus.num_gpus} GPUs, but the traced run had {num_devices}")
        return gpus
    device = hardware.find(about["device_kind"])
    if device is None:
        return None
    if configured and topology(configured).device == device and topology(configured).num_gpus == num_devices:
        return topology(configured)
    per_domain = _GPUS_PER_DOMAIN.get(device.name, 8)
    if num_devices <= per_domain or num_devices % per_domain:
        return topology(f"{device.name}:1x{num_devices}")
    return topology(f"{device.name}:{num_devices // per_domain}x{per_domain}")
