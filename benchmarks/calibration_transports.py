"""Estimated gain of NVSHMEM over NCCL, to compare with NVIDIA's measurements: a table of
2026-11-22-calibration.md.

Llama 3 8B on 64 GPUs of a GB200 NVL72, context 8 x tensor 8, one sequence per step: 8 to 16 nodes
of 4 GPUs ran in "Accelerating Long-Context Model Training in JAX and XLA"
(developer.nvidia.com/blog, 2026-02-03), with unpublished meshes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.published import PublishedRun, program
from jaxlc.hlo import AnalyzedProgram
from jaxlc.simulate.time_model import TimeModel
from jaxlc.simulate.timeline import NCCL_SMS, predict

_MEASURED_GAINS = {65_536: "0.3% to 3.9%", 262_144: "30.4% to 36.3%"}


def measure(programs: Path | None) -> list[dict]:
    """Estimates of both transports at both lengths.

    Args:
      programs: where compiled programs are kept; None: nowhere.
    """
    rows = []
    for seq_len in _MEASURED_GAINS:
        for transport in ("nccl", "nvshmem"):
            run = _run(seq_len, transport)
            model = TimeModel(run.gpus, run.config)
            compiled = program(run, programs)
            prediction = predict(compiled, model)
            rows.append(
                dict(
                    seq_len=seq_len,
                    transport=transport,
                    step_seconds=prediction.step_seconds,
                    sms_seconds=prediction.seconds_by_resource.get(NCCL_SMS, 0.0),
                    exposed_seconds=prediction.exposed_communication_seconds,
                    hop_seconds=_hop_seconds(compiled, model),
                )
            )
    return rows


def table(rows: Sequence[dict]) -> Iterator[str]:
    """Markdown: estimated gain, its terms, and the gain if NCCL hid no hop."""
    heads = (
        "sequence length",
        "measured gain",
        "estimated gain",
        "SMs of NCCL",
        "exposed",
        "all hops",
    )
    yield f"| {' | '.join(heads)} | gain if NCCL hid no hop |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    steps = {(row["seq_len"], row["transport"]): row for row in rows}
    for seq_len, measured in _MEASURED_GAINS.items():
        nccl, nvshmem = steps[seq_len, "nccl"], steps[seq_len, "nvshmem"]
        seconds = nvshmem["step_seconds"]
        gain = nccl["step_seconds"] / seconds - 1
        bound = gain + nccl["hop_seconds"] / seconds
        shares = (
            nccl[name] / nccl["step_seconds"]
            for name in ("sms_seconds", "exposed_seconds", "hop_seconds")
        )
        cells = (
            f"{seq_len:,}",
            measured,
            f"{gain:.1%}",
            *(f"{share:.1%}" for share in shares),
            f"{bound:.1%}",
        )
        yield f"| {' | '.join(cells)} |"


def _run(seq_len: int, transport: str) -> PublishedRun:
    settings = {
        "mesh.context": 8,
        "mesh.tensor": 8,
        "data.seq_len": seq_len,
        "memory.remat": "attention",
        "runtime.transport": transport,
    }
    return PublishedRun(
        source="transports", name=f"{seq_len} {transport}", where="", figure=0, unit="s per step", published="",
        assumed=[], topology="gb200:1x64", settings=settings,
    )  # fmt: skip


def _hop_seconds(compiled: AnalyzedProgram, model: TimeModel) -> float:
    """Seconds of all collective permutes, one after the other."""
    return sum(
        collective.times * model.collective_seconds(collective, collective.sent_bytes)[0]
        for collective in compiled.collectives
        if collective.kind == "collective-permute"
    )
