"""Problem sizes of the measurements: for an 80 GB GPU, and small ones for a dry run on a CPU."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads of an attention call: N query heads, K key/value heads of dimension H."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads}/{self.num_kv_heads} x {self.head_dim}"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes, in tokens unless noted."""

    is_dry_run: bool = False
    dtype: str = "bfloat16"
    heads: Heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)  # as in Llama 3 8B
    # kernel calls in one jitted loop; fewer for sequences above `full_calls_tokens`
    num_calls: int = 20
    full_calls_tokens: int = 16_384
    repeats: int = 3
    # Correctness.
    oracle_tokens: int = 1024
    oracle_window: int = 200
    oracle_heads: tuple[Heads, ...] = (
        Heads(num_heads=4, num_kv_heads=1, head_dim=128),
        Heads(num_heads=8, num_kv_heads=8, head_dim=64),
        Heads(num_heads=8, num_kv_heads=2, head_dim=96),
        Heads(num_heads=8, num_kv_heads=2, head_dim=256),
    )
    oracle_dtypes: tuple[str, ...] = ("float16",)  # in addition to `dtype`
    check_tokens: tuple[int, ...] = (32_768, 131_072)
    # Rates, workspace, long sequences, ring steps.
    rate_tokens: tuple[int, ...] = (16_384, 131_072, 4096, 65_536)  # the most important first
    rate_heads: tuple[Heads, ...] = (  # in addition to `heads`
        Heads(num_heads=16, num_kv_heads=4, head_dim=256),  # as in Qwen3.5-9B
        Heads(num_heads=64, num_kv_heads=8, head_dim=64),  # as in gpt-oss-20b
    )
    blockwise_max_tokens: int = 16_384
    workspace_tokens: tuple[int, ...] = (16_384, 131_072, 524_288, 1_048_576)
    workspace_heads: tuple[Heads, ...] = (
        Heads(num_heads=32, num_kv_heads=8, head_dim=128),
        Heads(num_heads=8, num_kv_heads=2, head_dim=128),
        Heads(num_heads=4, num_kv_heads=1, head_dim=128),
    )
    long_cases: tuple[tuple[int, Heads], ...] = (
        (1_048_576, Heads(num_heads=4, num_kv_heads=4, head_dim=128)),
        (524_288, Heads(num_heads=32, num_kv_heads=8, head_dim=128)),  # q has 2^31 elements
    )
    num_sampled: int = 256
    ring_cases: tuple[tuple[int, Heads], ...] = (
        (131_072, Heads(num_heads=32, num_kv_heads=8, head_dim=128)),
        (262_144, Heads(num_heads=8, num_kv_heads=2, head_dim=128)),
    )
    ring_ranks: int = 8
    tiles: int = 8
    kv_tokens_per_step: tuple[int, ...] = (16_384, 65_536)
    # Basics: matrix products of Llama 3 8B as (tokens, contracted, columns), and bytes of copies.
    products: tuple[tuple[int, int, int], ...] = (
        (8192, 4096, 4096),
        (8192, 4096, 14_336),
        (8192, 14_336, 4096),
        (8192, 4096, 128_256),
        (16_384, 16_384, 16_384),
    )
    copy_bytes: int = 4 * 2**30
    # Experts, model dim, width of an expert, tokens, experts of a token: Qwen3-30B-A3B.
    experts: tuple[int, int, int, int, int] = (128, 2048, 768, 32_768, 8)
    # Tokens, key heads, value heads and the dims of both: Qwen3.5-9B.
    recurrence: tuple[int, int, int, int] = (32_768, 16, 32, 128)
    # Training steps.
    preset: str = "llama3.2-1b"
    large_preset: str = "llama3.2-3b"
    step_tokens: tuple[int, ...] = (8192, 32_768, 131_072)
    remats: tuple[str, ...] = ("attention", "matmuls")
    num_masks: int = 2  # 1: some rows are for one document per sequence only
    memory_tokens: tuple[int, ...] = (16_384, 32_768, 65_536, 131_072)
    # preset, number of layers, tokens; the most important first
    profile_models: tuple[tuple[str, int, int], ...] = (
        ("llama3.1-8b", 4, 32_768),
        ("qwen3.5-9b", 4, 32_768),
        ("qwen3-30b-a3b", 4, 32_768),
        ("llama3.2-1b", 16, 131_072),
        ("llama3.2-1b", 16, 8192),
    )
    # Host memory.
    memory_fractions: tuple[str, ...] = ("0.75", "0.92")  # fractions of GPU memory in JAX's pool
    pinned_gib: tuple[float, ...] = (8, 32)
    host_stack: tuple[int, int] = (16, 2**28)  # arrays, and float32 elements of each
    overlap_tokens: int = 65_536  # attention next to copies: about 50 ms on an H100
    long_host_tokens: int = 262_144
    host_tile_tokens: int = 32_768
    large_host_tokens: int = 65_536
    equality_tokens: int = 8192
    # Training loop.
    loop_steps: int = 400
    log_every_steps: tuple[int, ...] = (1, 10)
    loop_overrides: tuple[str, ...] = (
        "--config.mesh.context=1", "--config.mesh.tensor=1", "--config.runtime.simulated_devices=0",
        "--config.train.eval_every_steps=0", "--config.train.checkpoint_every_steps=0",
    )  # fmt: skip
    # The long run.
    long_run_config: str = "1m_1gpu:lora"
    long_run_tokens: int = 262_144
    longest_run_tokens: int = 425_984  # whose step ends within one call
    long_run_settings: dict[str, Any] = field(default_factory=dict)


_SMALL = Heads(num_heads=4, num_kv_heads=2, head_dim=16)
DRY_RUN = Sizes(
    is_dry_run=True, dtype="float32", heads=_SMALL, num_calls=2, repeats=1, oracle_tokens=64, oracle_window=20,
    oracle_heads=(), oracle_dtypes=(), check_tokens=(64,), rate_tokens=(64,), rate_heads=(_SMALL,),
    blockwise_max_tokens=64,
    workspace_tokens=(64,), workspace_heads=(_SMALL,), long_cases=((64, _SMALL),), num_sampled=8,
    ring_cases=((64, _SMALL),), ring_ranks=2, tiles=2, kv_tokens_per_step=(32,), products=((32, 32, 32),),
    experts=(4, 16, 8, 32, 2),
    recurrence=(256, 1, 2, 16),
    copy_bytes=2**16, preset="tiny", large_preset="tiny", step_tokens=(64,), remats=("attention",), num_masks=1,
    memory_tokens=(64,), memory_fractions=("0.75",), profile_models=(("tiny", 2, 64),), pinned_gib=(0.001,),
    host_stack=(4, 2**10), overlap_tokens=64, long_host_tokens=128, host_tile_tokens=64, large_host_tokens=128,
    equality_tokens=64, loop_steps=150, log_every_steps=(10,),
    loop_overrides=(
        "--config.mesh.context=1", "--config.mesh.tensor=1", "--config.runtime.simulated_devices=1",
        "--config.train.eval_every_steps=0", "--config.train.checkpoint_every_steps=0", "--config.data.seq_len=64",
        "--config.model.num_layers=1", "--config.train.eval_sequences=1", "--config.data.sources=docs/*.md",
    ),
    long_run_config="1m_1gpu:mini", long_run_tokens=256, longest_run_tokens=512,
    long_run_settings={"data.sources": "docs/*.md", "lora.rank": 4, "train.checkpoint_frozen": False},
)  # fmt: skip
