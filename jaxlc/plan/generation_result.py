"""The plan of generation: its values, its JSON, and its page of plain text."""

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxlc.core.axes import mesh_text
from jaxlc.core.counts import gib
from jaxlc.hlo.memory_dump import LiveTensor
from jaxlc.hlo.op_names import label
from jaxlc.plan.memory import USABLE_SHARE
from jaxlc.plan.report import percent_text
from jaxlc.simulate.interval import Interval, estimate_text, range_text

_WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """A compiled program: memory per GPU, besides weights and cache, and the estimated time."""

    tokens: int  # per sequence in one run of the program, padding included
    temp_bytes: int  # temporaries and results
    workspace_bytes: int  # scratch memory of kernels; upper bound
    nccl_bytes: int  # upper bound
    seconds: float  # prefill: of the whole prompt. Decoding: of one step, one token per sequence
    seconds_interval: tuple[float, float]  # 80% of published training runs, lowest first; generation was not compared
    seconds_by_kind: dict[str, float]  # "attention", "matrix products", "other kernels", "waiting" for communication
    kernels: dict[str, int]  # executions in one run of the program
    largest: tuple[LiveTensor, ...]  # largest arrays at the peak

    @property
    def interval(self) -> Interval:
        """`seconds_interval` as factors."""
        low, high = self.seconds_interval
        return Interval(low / self.seconds, high / self.seconds)

    @property
    def peak_bytes(self) -> int:
        """Temporaries, workspace and NCCL's buffers."""
        return self.temp_bytes + self.workspace_bytes + self.nccl_bytes


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """The plan of `jaxlc generate --plan`: AOT-compiled memory and estimated times. Print it."""

    topology: str  # NVLink domains x GPUs per domain: "h100:8x8"
    num_devices: int  # GPUs of the topology
    mesh: dict[str, int]  # size of each mesh axis
    prompt_tokens: int  # per sequence
    new_tokens: int  # per sequence
    batch_size: int  # sequences
    cache_dtype: str  # dtype of keys and values
    cache_tokens: int  # per sequence
    compile_seconds: float  # on this machine, for both programs
    kernel_choice: str  # the attention kernel, and why it was selected
    weights_bytes: int  # per GPU, in the compute dtype
    float32_params_bytes: int  # per GPU: of a `Result`; generation from a path frees them
    cache_bytes: int  # per GPU
    device_capacity_bytes: int  # memory of a GPU; generation may use 95%
    prefill: ProgramPlan  # a chunk of the prompt
    decode: ProgramPlan  # one new token per sequence

    @property
    def device_peak_bytes(self) -> int:
        """Weights, cache and the larger peak of the two programs, per GPU."""
        return self.weights_bytes + self.cache_bytes + max(self.prefill.peak_bytes, self.decode.peak_bytes)

    @property
    def usable_bytes(self) -> float:
        """95% of a GPU's memory."""
        return USABLE_SHARE * self.device_capacity_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the usable memory."""
        return self.device_peak_bytes <= self.usable_bytes

    @property
    def prefill_tokens_per_second(self) -> float:
        """Of all GPUs."""
        return self.batch_size * self.prompt_tokens / self.prefill.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all sequences and GPUs."""
        return self.batch_size / self.decode.seconds

    def to_json(self) -> dict[str, Any]:
        derived = ("device_peak_bytes", "usable_bytes", "fits", "prefill_tokens_per_second", "decode_tokens_per_second")
        values = dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}
        for name in ("prefill", "decode"):
            values[name]["largest"] = [tensor._asdict() for tensor in getattr(self, name).largest]
            values[name]["peak_bytes"] = getattr(self, name).peak_bytes
        return values

    def __str__(self) -> str:
        return _page(self)


def _page(plan: GenerationPlan) -> str:
    """Plain text of at most 120 columns."""
    sections = _head(plan), _memory(plan), _kernels(plan), _time(plan)
    lines = [line for section in sections for line in (*section, "")]
    verdict = "fits" if plan.fits else "does not fit"
    usable = f"{gib(plan.device_peak_bytes)} of {gib(plan.usable_bytes)} GiB per GPU"
    return "\n".join([*lines, f"VERDICT: {verdict}, {usable}."])


def _head(plan: GenerationPlan) -> Iterator[str]:
    yield f"GENERATION on {plan.topology}: {plan.num_devices} GPUs, {mesh_text(plan.mesh)}"
    yield f"AOT-compiled in {plan.compile_seconds:.0f} s, not run"
    yield (
        f"batch {plan.batch_size:,}, prompts of {plan.prompt_tokens:,} tokens in chunks of {plan.prefill.tokens:,},"
        f" {plan.new_tokens:,} new tokens"
    )
    yield f"KV cache: {plan.cache_dtype}, {plan.cache_tokens:,} tokens per sequence"
    yield from textwrap.wrap(f"attention kernel: {plan.kernel_choice}", _WIDTH, subsequent_indent="  ")


def _memory(plan: GenerationPlan) -> Iterator[str]:
    yield f"{'MEMORY per GPU, AOT-compiled':<32}     prefill    decode   GiB"
    programs = plan.prefill, plan.decode
    shared_bytes = plan.weights_bytes + plan.cache_bytes
    yield _row("weights", [plan.weights_bytes] * 2)
    yield _row("KV cache", [plan.cache_bytes] * 2)
    yield _row("temporaries and results", [program.temp_bytes for program in programs])
    yield _row("kernel workspaces", [program.workspace_bytes for program in programs], "upper bound")
    yield _row("NCCL buffers", [program.nccl_bytes for program in programs], "upper bound")
    yield _row("peak", [shared_bytes + program.peak_bytes for program in programs])
    yield _row("usable", [plan.usable_bytes] * 2, f"{USABLE_SHARE:.0%} of {gib(plan.device_capacity_bytes)}")
    yield f"  A loaded Result also keeps its float32 parameters, {gib(plan.float32_params_bytes)} GiB."
    yield "largest arrays at the peak of a prefill chunk"
    for tensor in plan.prefill.largest:
        yield f"  {tensor.shape:<34} {gib(tensor.bytes):>9}  {label(tensor.made_by)}"


def _kernels(plan: GenerationPlan) -> Iterator[str]:
    yield f"{'KERNELS per run of a program':<32}     prefill    decode"
    for name in dict.fromkeys([*plan.prefill.kernels, *plan.decode.kernels]):
        counts = (program.kernels.get(name, 0) for program in (plan.prefill, plan.decode))
        yield f"  {name:<34} " + " ".join(f"{count:>9,}" for count in counts)


def _time(plan: GenerationPlan) -> Iterator[str]:
    yield "ESTIMATED TIME: median (80% interval of published training runs; generation was not compared)"
    for name, program, num_tokens, unit in (
        ("prefill", plan.prefill, plan.batch_size * plan.prompt_tokens, ""),
        ("decode", plan.decode, plan.batch_size, " per token of each sequence"),
    ):
        rate = range_text(num_tokens / program.seconds, "tokens/s", program.interval.inverse)
        yield f"  {name:<12} {estimate_text(program.seconds, program.interval)}{unit}, {rate}"
        yield f"  {'':<12} {percent_text(program.seconds_by_kind, program.seconds)}"
    yield "  Without the choice of tokens and the work of the host between two programs."


def _row(name: str, num_bytes: list[float], note: str = "") -> str:
    return f"  {name:<34} {' '.join(f'{gib(size):>9}' for size in num_bytes)}  {note}".rstrip()
