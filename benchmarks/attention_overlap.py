"""What of attention's communication hides behind attention, read from the compiled step: a table for each strategy."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.causal_work import causal_pairs, document_pairs, visited_pairs
from jaxlc.config import Config, defaults, load
from jaxlc.hlo import Program, parse
from jaxlc.hlo.attention_flops import flops_by_rank, imbalance
from jaxlc.hlo.attention_hops import Hop, hops
from jaxlc.hlo.op_names import PASSES, Pass
from jaxlc.simulate.topology import Topology, make_mesh, options_without_gpu
from jaxlc.train.step import build_step

STRATEGIES = ("ring", "hybrid", "ulysses", "all_gather")
_PRODUCTS = {"forward": 2, "recomputation": 2, "backward": 5}  # matrix products over the head dim for each pair


class CompiledStep(NamedTuple):
    """A training step, compiled and read."""

    config: Config
    topology: Topology
    kernel: str
    program: Program
    temp_bytes: int

    @property
    def hops(self) -> list[Hop]:
        return hops(self.program)

    def is_hidden(self, hop: Hop) -> bool:
        return hop.is_hidden(self.topology.device, self.topology.gpus_per_domain)

    def attention_flops(self) -> dict[Pass, list[float]]:
        """Of one step, on each rank. Raises ValueError where the kernel does not tell; see `flops_by_rank`."""
        context = self.config.mesh.context
        visited = functools.partial(visited_pairs, self.config.data.seq_len, context)
        return flops_by_rank(self.program, visited, context)

    def least_attention_flops(self, which: Pass) -> float:
        """What the causal mask leaves to a pass, on all ranks together."""
        model, pairs = self.config.model, causal_pairs(self.config.data.seq_len)
        return 2.0 * _PRODUCTS[which] * model.num_layers * model.num_heads * model.head_dim * pairs


def two_layers(strategy: str, context: int, num_tokens: int, kernel: str = "auto") -> Config:
    """A Llama 3 8B of two layers, recomputed in the backward, for rows of one document, split over context only.

    Two, because a loop over one layer is no loop, and the compiler then mixes its forward with its recomputation. The
    hybrid strategy exchanges heads among 8 neighbours, as in a node, and among 2 where there are no more than 8 ranks.
    """
    config = defaults()
    config.model.preset = "llama3-8b"
    config.model.num_layers = 2
    config.mesh.context = context
    config.attention.update(strategy=strategy, kernel=kernel, document_mask=False)
    if strategy == "hybrid":
        config.attention.ulysses_degree = 8 if context > 8 else 2
    config.data.seq_len = num_tokens
    config.memory.remat = "full"
    return load(config)


def compile_step(config: Config, topology: Topology) -> CompiledStep:
    """Compiles the training step of `config` for all GPUs of `topology`."""
    step = build_step(config, make_mesh(topology, config.mesh))
    executable = step.compile(extra_options=options_without_gpu(config.precision.compute))
    temp_bytes = executable.memory_analysis().temp_size_in_bytes
    return CompiledStep(config, topology, step.kernel.name, parse(executable.as_text()), temp_bytes)


def page(topologies: Sequence[Topology], num_tokens: int, command: str) -> str:
    """The tables for each topology, all of its GPUs along the context axis, as a Markdown page."""
    parts = [_INTRODUCTION.format(command=command, num_tokens=num_tokens)]
    for topology in topologies:
        parts += [f"\n## {topology}\n", *_HEADER]
        notes = []
        for strategy in STRATEGIES:
            try:
                config = two_layers(strategy, topology.num_gpus, num_tokens)
            except ValueError as error:
                notes.append(f"- `{strategy}`: {error}")
                continue
            compiled = compile_step(config, topology)
            parts += _rows(compiled)
            notes.append(_summary(compiled))
        parts += ["", *notes]
    return "\n".join([*parts, *_documents(num_tokens, sorted({each.num_gpus for each in topologies}))]) + "\n"


_INTRODUCTION = """\
# What of attention's communication is hidden

Made by `{command}`:
two layers of Llama 3 8B at {num_tokens:,} tokens, bfloat16, rows of one document, remat `full`, compiled for GPUs that
are not there, all of which split the sequence. Bytes, counts and order are read from the scheduled program; times
are those of the model in `jaxlc/core/hardware.py`, not measurements. `h100:8x8` is NVLink domains x GPUs in each; an
exchange that leads any GPU out of its domain is timed by the network.

An exchange is *hidden* when attention kernels run between its start and its done, and their modelled time is at least
its own. Exchanges that are under way together are timed as if on one link, each with the bytes of all. `times` is in
one step: instructions times the rounds of their loops. What is less than 1 MiB is left out."""
_COLUMNS = (
    "strategy", "kernel", "pass", "exchange", "MiB sent", "times", "kernels meanwhile", "exchange ms", "kernels ms", "",
)  # fmt: skip
_HEADER = (f"| {' | '.join(_COLUMNS)} |", "| --- " * len(_COLUMNS) + "|")


def _rows(compiled: CompiledStep) -> Iterator[str]:
    counted = Counter()
    for hop in compiled.hops:
        if hop.collective.sent_bytes >= 2**20:
            counted[hop.which, hop.collective.kind, _figures(compiled, hop)] += hop.times
    for (which, kind, (sent, *figures)), times in sorted(counted.items(), key=lambda row: PASSES.index(row[0][0])):
        yield "| " + " | ".join([
            f"`{compiled.config.attention.strategy}`", compiled.kernel, which, kind, sent, str(times), *figures
        ]) + " |"  # fmt: skip


def _figures(compiled: CompiledStep, hop: Hop) -> tuple[str, ...]:
    device = compiled.topology.device
    return (
        f"{hop.collective.sent_bytes / 2**20:.0f}",
        str(len(hop.meanwhile)),
        f"{1e3 * hop.seconds(device, compiled.topology.gpus_per_domain):.3g}",
        f"{1e3 * hop.hiding_seconds(device):.3g}",
        "hidden" if compiled.is_hidden(hop) else "**exposed**",
    )


def _summary(compiled: CompiledStep) -> str:
    try:
        flops = compiled.attention_flops()
    except ValueError as error:
        work = str(error)
    else:
        ratios = {which: sum(flops[which]) / compiled.least_attention_flops(which) for which in flops}
        work = "attention FLOPs over the causal minimum: "
        work += ", ".join(f"{which} {ratio:.4f}" for which, ratio in ratios.items())
        work += f"; busiest rank over the mean: {max(imbalance(each) for each in flops.values()):.4f}"
    return f"- `{compiled.config.attention.strategy}`: temporaries {compiled.temp_bytes / 2**30:.1f} GiB a GPU; {work}"


def _documents(num_tokens: int, contexts: Sequence[int]) -> Iterator[str]:
    yield "\n## Packed documents\n"
    yield "Zigzag order balances a row of one document. Packed ones are skipped tile by tile, and ranks differ:"
    yield "pairs of the busiest rank over the mean (counted exactly, on the host).\n"
    yield "| documents of a row | " + " | ".join(f"context {context}" for context in contexts) + " |"
    yield "| --- |" + " --- |" * len(contexts)
    for share in (1, 3, 8, 64):
        length = num_tokens // share
        documents = [length] * share + ([num_tokens - share * length] if num_tokens % share else [])
        ratios = (imbalance(document_pairs(documents, context)) for context in contexts)
        yield f"| of {length:,} tokens each | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |"
    halves = [num_tokens // 2 ** (1 + power) for power in range(10)]
    documents = [*halves, num_tokens - sum(halves)]
    ratios = (imbalance(document_pairs(documents, context)) for context in contexts)
    yield "| each half of the one before | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |"
