"""Times attention strategies and kernels over sequence lengths: a table, JSONL rows and a plot.

python -m benchmarks.attention_speed --context=8 --simulated_devices=8 --seq_len=2048,4096,8192
--out=runs/attention python -m benchmarks.attention_speed --strategies=ring,all_gather
--seq_len=32768 --dtype=bfloat16
"""

import dataclasses
import functools
import importlib
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.environment import environment_info
from jaxlc import attention
from jaxlc.attention import zigzag_order
from jaxlc.config import AttentionConfig, MeshConfig, RuntimeConfig
from jaxlc.core import hardware
from jaxlc.core.axes import BATCH_AXES, CONTEXT, TENSOR
from jaxlc.core.errors import UserError
from jaxlc.runtime.start import start
from jaxlc.search.measure import interleaved_seconds
from jaxlc.sharding.mesh import make_mesh

RINGATTENTION = "ringattention"  # the package of that name (Liu et al.), used like a strategy


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One measurement: causal self-attention of one sequence."""

    strategy: str
    seq_len: int
    kernel: str = "auto"
    backward: bool = True  # forward and backward; False: forward only
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float32"
    window: int = 0  # sliding window in tokens; 0: none
    num_documents: int = 1  # documents of equal length, which attend within themselves
    ulysses_degree: int = 1  # for strategy hybrid

    @property
    def causal_flops(self) -> float:
        """FLOPs of the visible (query, key) pairs: 4 N H per pair forward, and 2.5 times that
        backward, which has five matrix products instead of two (FlashAttention-2, arXiv:2307.08691,
        section 3.1)."""
        num_tokens = self.seq_len / self.num_documents
        # queries with a full window
        num_cut_off = num_tokens - min(self.window or num_tokens, num_tokens)
        num_pairs = (
            self.num_documents
            * (num_tokens * (num_tokens + 1) - num_cut_off * (num_cut_off + 1))
            / 2
        )
        return 4.0 * self.num_heads * self.head_dim * num_pairs * (3.5 if self.backward else 1.0)


@dataclass(frozen=True, kw_only=True)
class CompiledCase:
    """A compiled attention call with its inputs."""

    case: AttentionCase
    mesh: Mesh
    compiled: jax.stages.Compiled
    inputs: tuple[jax.Array, ...]

    def call(self):
        return self.compiled(*self.inputs)

    def row(self, seconds: list[float]) -> dict:
        """The case; seconds (median) and seconds_min of a call; tflops, causal, over all devices;
        share_of_peak, None if the peak of the device is unknown; temp_bytes per device."""
        device = hardware.find(self.mesh.devices.flat[0].device_kind)
        flops_per_second = self.case.causal_flops / statistics.median(seconds)
        peak = device.bf16_flops_per_second * self.mesh.size if device else None
        return dataclasses.asdict(self.case) | dict(
            mesh=" ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items() if size > 1),
            seconds=statistics.median(seconds),
            seconds_min=min(seconds),
            tflops=flops_per_second / 1e12,
            share_of_peak=flops_per_second / peak if peak else None,
            temp_bytes=self.compiled.memory_analysis().temp_size_in_bytes,
        )


def define_flags(values: flags.FlagValues = flags.FLAGS) -> None:
    """Flags named like a field of AttentionCase set that field in all cases."""
    string = functools.partial(flags.DEFINE_string, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    flags.DEFINE_list(
        "strategies",
        ["ring"],
        "strategies of jaxlc, or ringattention (the package)",
        flag_values=values,
    )
    flags.DEFINE_list("seq_len", ["2048", "4096", "8192"], "sequence lengths", flag_values=values)
    string("kernel", "auto", "attention kernel of all strategies")
    flags.DEFINE_bool(
        "backward",
        True,
        "time forward and backward; --nobackward: forward only",
        flag_values=values,
    )
    integer("num_heads", 8, "query heads")
    integer("num_kv_heads", 8, "key/value heads")
    integer("head_dim", 64, "head dimension")
    string("dtype", "float32", "dtype of queries, keys and values")
    integer("window", 0, "sliding window in tokens; 0: none")
    integer("num_documents", 1, "documents of equal length in the sequence; 1: no document mask")
    integer("ulysses_degree", 1, "all-to-all group size of strategy hybrid")
    integer("context", 1, "devices on the context mesh axis")
    integer("tensor", 1, "devices on the tensor mesh axis")
    integer("simulated_devices", 0, "number of simulated CPU devices; 0: real devices")
    integer("repeats", 5, "timed calls per case")
    string("out", "runs/attention_speed", "directory of attention.jsonl and attention.png")


def cases_from_flags(values: flags.FlagValues) -> list[AttentionCase]:
    """Every strategy at every sequence length."""
    fields = {field.name for field in dataclasses.fields(AttentionCase)} - {"strategy", "seq_len"}
    settings = {name: values[name].value for name in fields}
    return [
        AttentionCase(strategy=strategy, seq_len=int(seq_len), **settings)
        for seq_len, strategy in product(values["seq_len"].value, values["strategies"].value)
    ]


def main(_) -> None:
    values = flags.FLAGS
    start(RuntimeConfig(simulated_devices=values.simulated_devices))
    mesh_config = MeshConfig(context=values.context, tensor=values.tensor)
    try:
        measure(cases_from_flags(values), mesh_config, values.repeats, Path(values.out))
    except UserError as error:
        sys.exit(f"error: {error}")


def measure(
    cases: list[AttentionCase], mesh_config: MeshConfig, repeats: int, out: Path
) -> list[dict]:
    """Times all cases, interleaved for each length; prints a table, writes attention.jsonl and
    attention.png.

    Raises:
      UserError: the mesh needs more devices than there are, or ringattention is not installed.
    """
    if len(jax.devices()) < mesh_config.num_devices:
        raise UserError(
            f"the mesh needs {mesh_config.num_devices} devices, but JAX has {len(jax.devices())}"
        )
    mesh = make_mesh(mesh_config, jax.devices()[: mesh_config.num_devices])
    out.mkdir(parents=True, exist_ok=True)
    console, rows = Console(), []
    with (out / "attention.jsonl").open("a") as file:
        seq_lens = dict.fromkeys(case.seq_len for case in cases)
        for seq_len in track(seq_lens, "measuring", console=console, transient=True):
            compiled_cases = [compile_case(case, mesh) for case in cases if case.seq_len == seq_len]
            seconds = interleaved_seconds([compiled.call for compiled in compiled_cases], repeats)
            new = [
                compiled.row(times) | environment_info()
                for compiled, times in zip(compiled_cases, seconds)
            ]
            file.writelines(json.dumps(row) + "\n" for row in new)
            file.flush()
            rows += new
    console.print(_table(rows))
    _plot(rows, out / "attention.png")
    console.print(f"{out / 'attention.jsonl'}, {out / 'attention.png'}", highlight=False)
    return rows


def compile_case(case: AttentionCase, mesh: Mesh) -> CompiledCase:
    """Compiles the case for random inputs that are sharded over the mesh."""
    attend = (
        _ringattention(mesh, case.seq_len)
        if case.strategy == RINGATTENTION
        else _jaxlc_attention(case, mesh)
    )
    *qkv, dout = _inputs(case, mesh)

    def gradient(q, k, v):
        return jax.grad(lambda *qkv: (attend(*qkv) * dout).sum().astype(jnp.float32), (0, 1, 2))(
            q, k, v
        )

    compiled = jax.jit(gradient if case.backward else attend).lower(*qkv).compile()
    return CompiledCase(case=case, mesh=mesh, compiled=compiled, inputs=tuple(qkv))


def _jaxlc_attention(case: AttentionCase, mesh: Mesh) -> Callable:
    """`attend(q_BTNH, k_BTKH, v_BTKH) -> out_BTNH`."""
    config = AttentionConfig(
        strategy=case.strategy, kernel=case.kernel, ulysses_degree=case.ulysses_degree
    )
    attend = attention.make(config, mesh, window=case.window or None)
    if case.num_documents == 1:
        return lambda q, k, v: attend(q, k, v)[0]
    if case.seq_len % case.num_documents:
        raise UserError(
            f"{case.num_documents} documents do not divide a sequence of {case.seq_len} tokens"
        )
    order = zigzag_order(case.seq_len, mesh.shape[CONTEXT])
    segments_BT = jnp.asarray(order // (case.seq_len // case.num_documents) + 1, jnp.int32)[None]
    return lambda q, k, v: attend(q, k, v, attend.prepare(None, segments_BT))[0]


def _ringattention(mesh: Mesh, seq_len: int) -> Callable:
    """Causal ring attention of the package ringattention 0.1.2, as `attend(q_BTNH, k_BTNH, v_BTNH)
    -> out_BTNH`.
    """
    # Its last release reads at import an attribute that JAX has removed.
    from jax.extend import backend

    jax.lib.xla_bridge = type("xla_bridge", (), {"get_backend": staticmethod(backend.get_backend)})
    try:
        ring_attention = importlib.import_module("ringattention.ringattention_jax").ring_attention
    except ImportError as error:
        raise UserError(
            f"{error}; install it with: pip install ringattention==0.1.2 einops"
        ) from None
    chunk_size = min(512, seq_len // mesh.size)
    settings = dict(
        causal_block_size=1, deterministic=True, dropout_rng=None, attn_pdrop=0.0, query_chunk_size=chunk_size,
        key_chunk_size=chunk_size, dtype=jnp.float32, policy=jax.checkpoint_policies.nothing_saveable, precision=None,
        prevent_cse=False,
    )  # fmt: skip
    heads = PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False
    )
    def attend(q, k, v):
        return ring_attention(q, k, v, None, None, None, CONTEXT, True, settings)

    return attend


def _inputs(case: AttentionCase, mesh: Mesh) -> tuple[jax.Array, ...]:
    """Random (q, k, v, dout). A GPU computes zeros faster than random numbers."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES, CONTEXT, TENSOR, None))
    num_heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads, case.num_heads)
    keys = jax.random.split(jax.random.key(0), len(num_heads))
    shapes = [(1, case.seq_len, count, case.head_dim) for count in num_heads]
    arrays = [jax.random.normal(key, shape, case.dtype) for key, shape in zip(keys, shapes)]
    return tuple(jax.device_put(array, sharding) for array in arrays)


def _table(rows: list[dict]) -> Table:
    first = rows[0]
    passes = "forward + backward" if first["backward"] else "forward"
    table = Table(
        title=f"{passes}, {first['num_heads']} heads of {first['head_dim']} ({first['num_kv_heads']} key/value),"
        f" {first['dtype']}, {first['mesh'] or 'one device'}",
        caption=f"{first['device']}, jax {first['jax']}, {first['commit']}; median of the calls; causal FLOPs",
    )
    for heading in (
        "sequence length",
        "strategy",
        "ms",
        "min ms",
        "TFLOP/s",
        "of peak",
        "temp MiB per device",
    ):
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for row in rows:
        share = row["share_of_peak"]
        table.add_row(
            f"{row['seq_len']:,}",
            row["strategy"],
            f"{1e3 * row['seconds']:,.1f}",
            f"{1e3 * row['seconds_min']:,.1f}",
            f"{row['tflops']:.3g}",
            "" if share is None else f"{share:.1%}",
            f"{row['temp_bytes'] / 2**20:,.1f}",
        )
    return table


def _plot(rows: list[dict], path: Path) -> None:
    """TFLOP/s over sequence length, one line per strategy."""
    from matplotlib.figure import Figure  # imported here because matplotlib is slow to import

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    axes = figure.subplots()
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        points = [(row["seq_len"], row["tflops"]) for row in rows if row["strategy"] == strategy]
        axes.plot(*zip(*points), "o-", label=strategy)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="sequence length, tokens",
        ylabel="TFLOP/s, causal, all devices",
        title="Attention speed",
    )
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    define_flags()
    app.run(main)
