"""Times attention strategies and kernels over sequence lengths: a table, JSONL rows, a picture.

python scripts/bench_attention.py --context=8 --simulated_devices=8 --tokens=2048,4096,8192 --out=runs/bench
python scripts/bench_attention.py --strategies=ring,all_gather --tokens=32768 --dtype=bfloat16
"""

import sys
from pathlib import Path

from absl import app, flags

from jaxlc import runtime
from jaxlc.config import MeshConfig, RuntimeConfig
from jaxlc.core.errors import UserError

_STRATEGIES = flags.DEFINE_list("strategies", ["ring"], "of jaxlc; ringattention is the package of that name")
_KERNEL = flags.DEFINE_string("kernel", "auto", "the kernel of all strategies")
_TOKENS = flags.DEFINE_list("tokens", ["2048", "4096", "8192"], "sequence lengths")
_HEADS = flags.DEFINE_integer("heads", 8, "query heads")
_KV_HEADS = flags.DEFINE_integer("kv_heads", 8, "key/value heads")
_HEAD_DIM = flags.DEFINE_integer("head_dim", 64, "head dim")
_DTYPE = flags.DEFINE_string("dtype", "float32", "of queries, keys and values")
_WINDOW = flags.DEFINE_integer("window", 0, "sliding window, tokens; 0: none")
_ULYSSES_RANKS = flags.DEFINE_integer("ulysses_degree", 1, "of strategy hybrid")
_CONTEXT = flags.DEFINE_integer("context", 1, "devices along the sequence")
_TENSOR = flags.DEFINE_integer("tensor", 1, "devices along the heads")
_SIMULATED = flags.DEFINE_integer("simulated_devices", 0, "run on that many simulated CPU devices")
_FORWARD_ONLY = flags.DEFINE_bool("forward_only", False, "leave the backward out")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed calls of each")
_OUT = flags.DEFINE_string("out", "runs/bench_attention", "directory of attention.jsonl and attention.png")


def main(_) -> None:
    runtime.start(RuntimeConfig(simulated_devices=_SIMULATED.value))
    from benchmarks import attention_speed

    cases = attention_speed.cases(
        strategies=_STRATEGIES.value,
        lengths=[int(tokens) for tokens in _TOKENS.value],
        backward=not _FORWARD_ONLY.value,
        num_heads=_HEADS.value,
        num_kv_heads=_KV_HEADS.value,
        head_dim=_HEAD_DIM.value,
        kernel=_KERNEL.value,
        dtype=_DTYPE.value,
        window=_WINDOW.value,
        ulysses_degree=_ULYSSES_RANKS.value,
    )
    mesh = MeshConfig(context=_CONTEXT.value, tensor=_TENSOR.value)
    try:
        attention_speed.run(cases, mesh, _REPEATS.value, Path(_OUT.value))
    except UserError as error:
        sys.exit(f"bench_attention: {error}")


if __name__ == "__main__":
    app.run(main)
