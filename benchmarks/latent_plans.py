"""Prints the table of 2026-11-28-latent-plans.md as Markdown: models with latent attention.

    python -m benchmarks.latent_plans
    python -m benchmarks.latent_plans --cases=0,2

The steps are AOT-compiled for 8 H100s, for 1 to 5 minutes each. Plans are stored in --out; the same
command resumes.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxlc.config import read_config
from jaxlc.plan import Plan, plan
from jaxlc.plan.report import percent_text, step_text

TOPOLOGY = "h100:1x8"
_OFFLOAD = dict(remat="full", offload=("residual", "attention_out", "attention_lse"))


class Case(NamedTuple):
    preset: str
    seq_len: int
    memory: dict[str, Any]
    rank: int = 0  # of adapters; 0: all weights are trained
    is_packed: bool = True

    @property
    def name(self) -> str:
        lora = f", LoRA of rank {self.rank}" if self.rank else ""
        settings = ", ".join(
            f"`{name}={','.join(x) if isinstance(x, tuple) else x}`"
            for name, x in self.memory.items()
        )
        document = "" if self.is_packed else " of one document"
        return f"{self.preset}{lora}, {self.seq_len:,} tokens{document}, {settings}"


CASES = (
    Case("deepseek-v2-lite", 2**18, dict(remat="attention")),
    Case("deepseek-v2-lite", 2**18, dict(remat="attention"), is_packed=False),
    Case("glm-4.7-flash", 2**18, dict(remat="attention"), rank=16),
    Case("deepseek-v2-lite", 2**20, _OFFLOAD, rank=16),
    Case("glm-4.7-flash", 2**20, _OFFLOAD, rank=16),
    Case("deepseek-v2-lite", 2**20, _OFFLOAD | dict(optimizer="host")),
    Case("deepseek-v2-lite", 2**20, _OFFLOAD | dict(tile_tokens=16_384, optimizer="host")),
    Case("glm-4.7-flash", 2**20, _OFFLOAD | dict(tile_tokens=16_384), rank=16),
)


def compiled(case: Case) -> Plan:
    """The plan of a case: one sequence per step, whose tokens 8 ranks share."""
    config = read_config("256k:h100")
    config.model.preset = case.preset
    config.data.seq_len = case.seq_len
    config.mesh.update(context=8, fsdp=1, tensor=1)
    config.train.update(global_batch_size=1, gradient_accumulation_steps=1, eval_sequences=1)
    config.attention.document_mask = case.is_packed
    config.memory.update(case.memory)
    if case.rank:
        config.lora.update(
            rank=case.rank, projections=_projections(queries_have_latents="glm" in case.preset)
        )
    return plan(config, TOPOLOGY)


def _projections(*, queries_have_latents: bool) -> tuple[str, ...]:
    queries = ("query_down", "query_up") if queries_have_latents else ("query",)
    return (*queries, "latent", "key_value", "attention_projected")


def row(case: Case, result: Plan) -> Iterator[str]:
    """The cells of a case."""
    memory, predicted, ring = result.memory, result.predicted, result.ring
    fits = "" if memory.fits else ", does not fit"
    yield case.name
    yield f"{_gib(memory.device_peak_bytes)}{fits}"
    yield _gib(memory.host_bytes_per_node)
    yield ", ".join(
        f"{name} {' + '.join(f'{x:,.0f}' for x in sizes)}"
        for name, sizes in ring.token_bytes.items()
    )
    sent = (x.bytes for x in result.collectives if x.kind == "collective-permute")
    yield _gib(sum(sent))
    yield step_text(predicted)
    yield f"{predicted.expansion_seconds / predicted.step_seconds:.1%}"
    yield percent_text(predicted.seconds_by_kind, predicted.step_seconds)
    yield predicted.bound_by


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/latent_plans"))
    parser.add_argument("--cases", default="", help="numbers, separated by commas; all by default")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    heads = ("case", "GiB per GPU", "host GiB", "bytes per token and hop", "GiB sent per GPU")
    heads += ("step", "expansion", "by kind", "bound by")
    lines = [heads, ("---",) * len(heads)]
    numbers = map(int, arguments.cases.split(",")) if arguments.cases else range(len(CASES))
    for number in numbers:
        case = CASES[number]
        path = arguments.out / f"{number}.json"
        result = Plan.from_json(path) if path.exists() else compiled(case)
        if not path.exists():
            path.write_text(json.dumps(result.to_json()))
        lines.append((*row(case, result),))
    for line in lines:
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
