"""Every setting there is: frozen dataclasses with their defaults. Imports no jax.

A field's comment is its documentation. Values arrive through `jaxlc.config.load`, the one door, which checks
types and everything that can be checked before JAX starts; below it each function takes the sub-config it needs.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxlc.core.flops import training_flops


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A Llama-shaped decoder. In a config file, `preset` names the shapes and the other fields override it."""

    preset: str  # a name in jaxlc/config/presets.py
    vocab_size: int  # V; stored padded to a multiple of mesh.tensor
    num_layers: int  # L
    model_dim: int  # D
    num_heads: int  # N, query heads
    num_kv_heads: int  # K, key/value heads; N % K == 0
    head_dim: int  # H
    ffn_dim: int  # F
    tie_embeddings: bool  # the output head is the embedding, transposed
    qk_norm: bool  # RMSNorm over H on queries and keys, before RoPE (Qwen 3)
    norm_epsilon: float
    rope_theta: float
    rope_scaling_factor: float  # Llama 3 frequency scaling; 1.0 is none
    rope_scaling_low_freq_factor: float
    rope_scaling_high_freq_factor: float
    rope_scaling_original_tokens: int


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each mesh axis; their product is the number of devices."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.context * self.tensor


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    strategy: Literal["ring", "all_gather", "ulysses", "hybrid"] = "ring"  # how mesh.context splits the sequence
    ulysses_degree: int = 1  # of hybrid: so many neighbouring ranks exchange heads; mesh.context over it is the ring
    window: int = 0  # sliding window: a token sees itself and window - 1 tokens before it; 0: all of them
    document_mask: bool = True  # tokens see their own document only; False: all earlier tokens of the row
    kernel: Literal["auto", "cudnn", "pallas", "blockwise", "reference"] = "auto"  # a named kernel never falls back
    query_block_tokens: int = 512  # tile of the tiled kernels, queries
    key_block_tokens: int = 512  # tile of the tiled kernels, keys


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    sources: tuple[str, ...] = ("python-stdlib",)  # files, directories, globs, or the built-in corpus
    tokenizer: str = "bytes"  # "bytes", or the path of a Hugging Face tokenizer.json
    seq_len: int = 4096  # tokens per row, over all ranks
    text_field: str = "text"  # the field of .jsonl and .parquet records that holds the document
    eval_fraction: float = 0.05  # share of documents held out, chosen by a hash of the document's name
    seed: int = 0  # order of the rows
    cache_dir: str = "~/.cache/jaxlc"  # tokenized corpora are kept here
    prefetch_steps: int = 2  # batches prepared ahead of the step


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only, after clipping by the global norm."""

    learning_rate: float = 3e-4  # peak
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # each after a linear warm-up
    warmup_steps: int = 10
    decay_steps: int = 0  # wsd: length of the final linear decay
    final_learning_rate_ratio: float = 0.1  # cosine and wsd end at this share of the peak
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0  # 0 is no clipping


# Matrix products of a layer that precision.fp8_matmuls may name.
MATMUL_NAMES = ("query", "key", "value", "attention_projected", "mlp_gate", "mlp_up", "mlp_down")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Master weights, moments and sums of gradients are float32 in all of them.

    fp8 is bf16, but for the products of fp8_matmuls: e4m3 by e4m3, and backward e5m2 by e4m3. fp16 multiplies the mean
    loss by a scale, and leaves out an update that overflows.
    """

    compute: Literal["auto", "bf16", "fp32", "fp16", "fp8"] = "auto"  # auto: bf16 on GPU, fp32 on CPU
    fp8_matmuls: tuple[str, ...] = MATMUL_NAMES  # products of a layer in 8 bits; the others are bf16
    bf16_layers: tuple[int, ...] = ()  # layers of fp8 that stay in bf16, from 0, negative from the end: 0,-1 is usual
    fp8_scaling: Literal["current", "delayed"] = "current"  # by a tensor's own largest value, or that of past steps
    fp8_amax_history_len: int = 1024  # of delayed scaling: so many past steps
    loss_scale: float = 2.0**15  # of fp16, at step 0
    loss_scale_growth_factor: float = 2.0  # factor after loss_scale_growth_interval without an overflow
    loss_scale_growth_interval: int = 2000
    loss_scale_backoff_factor: float = 0.5  # factor after an overflow
    loss_scale_min: float = 1.0  # for an overflow at this scale train.nonfinite says what happens
    loss_scale_max: float = 2.0**24


# Tensors of a layer that memory.save and memory.offload may name, in the order in which they are made.
TENSOR_NAMES = (
    "residual",  # the layer's input
    "query",
    "key",
    "value",
    "attention_out",
    "attention_lse",
    "attention_projected",
    "mlp_gate",
    "mlp_up",
)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    remat: Literal["none", "full", "attention", "matmuls"] = "attention"  # what a layer keeps for its backward
    layers_per_remat_group: int = 1  # so many layers are recomputed together, and only the input of the first is kept
    save: tuple[str, ...] = ()  # more tensors that a layer keeps, by the names in TENSOR_NAMES of config/schema.py
    offload: tuple[str, ...] = ()  # tensors that wait for the backward in pinned host memory, by the same names
    parameters: Literal["device", "host"] = "device"  # where float32 weights and gradients rest; host: pinned memory
    optimizer: Literal["device", "host"] = "device"  # where AdamW's moments rest
    tile_tokens: int = 0  # tokens per device that a layer works on at a time, after all keys and values; 0: all of them
    loss_chunk_tokens: int = 1024  # tokens per device whose logits exist at one time


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    simulated_devices: int = 0  # > 0: run on that many simulated CPU devices (over all processes)
    num_processes: int = 1  # > 1: jax.distributed over coordinator_address
    process_id: int = 0
    coordinator_address: str = "127.0.0.1:9753"
    heartbeat_seconds: int = 100  # a peer silent for this long is dead, and this process exits
    topology: str = ""  # GPUs that the config is made for, as jaxlc.plan names them: "h100:8x8"
    transport: Literal["auto", "nccl", "nvshmem", "symmetric", "peer"] = "auto"  # of ring hops; named, never falls back
    transport_mismatch: Literal["error", "warn"] = "error"  # where the compiled step has another transport
    nvshmem_heap_bytes: int = 0  # on each GPU; holds all that NVSHMEM sends and receives. 0: its own 1 GiB
    unified_memory: bool = False  # GPU arrays may lie in the host's memory; for Grace Hopper and Grace Blackwell
    unified_memory_fraction: float = 0.0  # JAX's pool in GPU memories, more than 1. 0: 90% of the host's memory beside
    xla_preset: Literal["default", "overlap", "pipelined", "double_buffered", "uncombined", "no_graphs"] = (
        "overlap"  # compiler options for GPUs, docs/xla_flags.md
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 100  # optimizer steps
    global_batch_size: int = 1  # global batch: rows of data.seq_len per optimizer step
    gradient_accumulation_steps: int = 1  # the batch is processed in this many parts, one after the other
    seed: int = 0  # initial weights
    z_loss: float = 0.0  # weight of mean(log(Z)^2), PaLM section 5
    nonfinite: Literal["stop", "skip"] = "stop"  # what a NaN or infinite loss or gradient does
    eval_every_steps: int = 0  # 0: at the end only
    eval_sequences: int = 4  # held-out rows per evaluation
    checkpoint_every_steps: int = 0  # 0: at the end only
    keep_checkpoints: int = 2
    log_every_steps: int = 1  # loss is fetched, and one metrics row written, every so many steps


@dataclass(frozen=True, kw_only=True)
class Config:
    model: ModelConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all devices, padding included."""
        return self.train.global_batch_size * self.data.seq_len

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one optimizer step over all devices, with causal attention."""
        return training_flops(
            self.model, rows=self.train.global_batch_size, seq_len=self.data.seq_len, attention="causal"
        )
