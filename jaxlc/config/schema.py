"""The sections of the settings: frozen dataclasses with their defaults. Imports no jax.

The comments above or behind a field are its documentation, which `--help` prints. A number is at
least 0 unless its type names another range. `jaxlc.config.load` is the only way to make a Config:
it checks types, ranges and contradictions before JAX starts. Functions take the section they need.
The section `model` is in `model_schema`.
"""

from dataclasses import dataclass, field
from typing import Literal

from jaxlc.config.rollouts_schema import PosttrainConfig, RolloutsConfig
from jaxlc.config.values import (
    Above0,
    Above0UpTo1,
    Above1,
    Below2To32,
    Between0And1,
    From0Below1,
    From0UpTo1,
    From1,
    From1To12,
    FromMinus1,
    Levels,
    Tokens,
    ZeroOrAbove1,
)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices along each axis of the device mesh. The product is the number of devices."""

    data: From1[int] = 1  # data parallelism: parameters replicated, batch split
    # fully sharded data parallelism: parameters and optimizer state sharded, batch split
    fsdp: From1[int] = 1
    # context parallelism: sequence split; parameters and optimizer state are sharded here as well.
    context: From1[int] = 1
    tensor: From1[int] = 1  # tensor parallelism: heads, feed-forward and vocabulary split

    @property
    def num_devices(self) -> int:
        return self.num_replicas * self.context * self.tensor

    @property
    def num_replicas(self) -> int:
        """Parts that the batch is split into."""
        return self.data * self.fsdp


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Attention across the context axis: strategy, mask and kernel."""

    # how attention is computed for a sequence that is split over mesh.context. ring: K/V blocks are sent around a ring.
    # all_gather: each rank gathers all K/V. ulysses: an all-to-all exchanges sequence for heads. hybrid: ulysses within
    # groups of ulysses_degree ranks, ring between groups.
    strategy: Literal["ring", "all_gather", "ulysses", "hybrid"] = "ring"
    # strategy hybrid: number of adjacent ranks in a Ulysses group; divides mesh.context
    ulysses_degree: From1[int] = 1
    # what strategy ring sends of latent layers: their latents, which each step expands, or the keys and values of all
    # heads; docs/architecture.md.
    ring_payload: Literal["latents", "keys_values"] = "latents"
    # True: a query attends to keys of its own document only. False: to all earlier tokens of the
    # packed sequence.
    document_mask: bool = True
    # with document_mask. True: each long document is split over the context ranks by itself, and short documents are
    # assigned whole, so that all ranks have equal work. False: the packed sequence is split in zigzag order.
    document_sharding: bool = True
    # documents may continue a prefix that they share, which may continue another one, and so on, up to this number of
    # levels; 0: none. True means 1. A prefix is computed once, and its keys are sent once. For data.traces, and for
    # batches of the caller with prefix_ids.
    shared_prefixes: Levels = Levels(0)
    # attention kernel. auto: the fastest one that supports the mask, head size and device. A named kernel that does not
    # support the case is an error. fa3 needs a Hopper GPU and the extra `fa3-cuda12` or `fa3-cuda13`, with which auto
    # selects it. mosaic needs the extra `mosaic`, and auto never selects it.
    kernel: Literal["auto", "cudnn", "fa3", "pallas", "blockwise", "reference", "mosaic"] = "auto"
    query_block_tokens: From1[int] = 512  # query block size of the kernels pallas and blockwise
    key_block_tokens: From1[int] = 512  # KV block size of the same


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Muon with decoupled weight decay, after clipping of the global gradient norm."""

    name: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of layers; others have AdamW
    learning_rate: float = 3e-4  # peak learning rate
    # learning rate after the linear warm-up. cosine: cosine decay. wsd: constant, then linear decay in the last
    # decay_steps. constant: no decay. linear: linear decay.
    schedule: Literal["cosine", "wsd", "constant", "linear"] = "cosine"
    warmup_steps: int = 10  # steps of the linear warm-up from initial_learning_rate_ratio
    decay_steps: int = 0  # schedule wsd: steps of the final linear decay
    # learning rate before the warm-up as a fraction of the peak, such as 0.1 to warm up again from the final learning
    # rate of a cosine schedule.
    initial_learning_rate_ratio: From0UpTo1[float] = 0.0
    # cosine, linear and wsd: final learning rate as a fraction of the peak. The schedule reaches it one step after the
    # last step, as in transformers.
    final_learning_rate_ratio: From0UpTo1[float] = 0.1
    schedule_steps: int = 0  # of the schedule, warm-up included; 0: train.steps. Stages set it.
    schedule_start: int = 0  # updates of the optimizer before the schedule starts. Stages set it.
    beta1: From0Below1[float] = 0.9  # decay rate of the first moment
    beta2: From0Below1[float] = 0.95  # decay rate of the second moment
    epsilon: Above0[float] = 1e-8  # added to the denominator of Adam
    momentum: From0Below1[float] = 0.95  # muon: decay rate of the mean of the gradients
    # muon: scale of updates. match_rms_adamw: 0.2 sqrt(max(outputs, inputs)), for learning rates of AdamW. original:
    # sqrt(max(1, outputs / inputs)).
    muon_scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    muon_heads: bool = False  # muon: each head of a projection is a matrix of its own
    weight_decay: float = 0.1  # decoupled weight decay, multiplied by the learning rate; 0: none
    decay_embeddings: bool = True  # weight decay of the token embedding, not of the output head
    decay_norms: bool = False  # weight decay of norm scales and biases
    max_grad_norm: float = 1.0  # gradients are scaled down to this global L2 norm; 0: no clipping


# Matrix products of layers with attention and a dense feed-forward block.
MATMUL_NAMES = ("query", "key", "value", "attention_projected", "mlp_gate", "mlp_up", "mlp_down")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Data types of computation. Trained parameters, optimizer moments and sums of gradients over
    microbatches are float32.

    fp8 computes in bf16 except for the products in fp8_matmuls, which multiply e4m3 by e4m3 in the
    forward and e5m2 by e4m3 in the backward. fp16 multiplies the loss by a dynamic scale and skips
    updates that overflow.
    """

    # auto: bf16 on GPU, fp16 below compute capability 8.0, fp32 on CPU
    compute: Literal["auto", "bf16", "fp32", "fp16", "fp8"] = "auto"
    # data type in which the gradients of layer weights are summed over ranks. compute: that of `compute`, or bf16 with
    # fp8; half the bytes of fp32. Those of the embedding and of the output head are always summed in float32.
    reduce: Literal["compute", "fp32"] = "compute"
    # data type in which frozen matrices (train.trainable, train.frozen, lora.rank) are stored, without a float32 copy.
    # nf4: 4 bits and scales (QLoRA) in layers, bf16 for the embedding, the output head and routers. mxfp4: the experts
    # of gpt-oss in MXFP4, as its files have them, others in bf16; nf4 keeps these experts in MXFP4, too.
    frozen: Literal["bf16", "fp16", "fp32", "nf4", "mxfp4"] = "bf16"
    # fp8: matrix products computed in 8 bits, of query, key, value, attention_projected, mlp_gate, mlp_up, mlp_down; in
    # layers of experts also expert_gate, expert_up, expert_down. The others use bf16.
    fp8_matmuls: tuple[str, ...] = MATMUL_NAMES
    # fp8: indices of layers that use bf16 throughout, from 0, negative from the end; 0,-1 is
    # common.
    bf16_layers: tuple[int, ...] = ()
    # fp8: scale of each tensor. current: from its own largest magnitude. delayed: from that of past
    # steps.
    fp8_scaling: Literal["current", "delayed"] = "current"
    fp8_amax_history_len: From1[int] = 1024  # fp8 with delayed scaling: number of past steps
    loss_scale: Above0[float] = 2.0**15  # fp16: initial loss scale
    # fp16: factor after loss_scale_growth_interval steps without overflow
    loss_scale_growth_factor: From1[float] = 2.0
    # fp16: number of steps without overflow before the scale grows
    loss_scale_growth_interval: From1[int] = 2000
    loss_scale_backoff_factor: From0Below1[float] = 0.5  # fp16: factor after an overflow
    # fp16: smallest scale; train.nonfinite handles an overflow at this scale
    loss_scale_min: Above0[float] = 1.0
    loss_scale_max: Above0[float] = 2.0**24  # fp16: largest scale


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA (Hu et al. 2021): trained low-rank adapters of frozen projections; docs/lora.md."""

    rank: int = 0  # rank of the adapters; 0: no adapters
    alpha: Above0[float] = 32.0  # the output of an adapter is multiplied by alpha / rank
    # multiply it by alpha / sqrt(rank) instead (rsLoRA), which suits high ranks
    rslora: bool = False
    # projections with adapters, of query, key, value, attention_projected, mlp_gate, mlp_up, mlp_down; in
    # gated_delta_net layers also delta_gate, delta_step, delta_decay, which are in_proj_z, _b and _a of Qwen 3.5; in
    # kimi_delta layers also delta_step, decay_down, decay_up, gate_down and gate_up; in latent layers query or
    # query_down and query_up, latent, key_value; in layers of experts expert_gate, expert_up, expert_down, an adapter
    # for each expert; with model.attention.gate_projection also attention_gate. mlp_gate, mlp_up and mlp_down are in
    # dense layers and in shared experts.
    projections: tuple[str, ...] = MATMUL_NAMES
    # directory of adapters that peft or jaxlc export --adapters wrote, to start from instead of random ones
    # (docs/lora.md). The other settings of lora must be equal to theirs
    init_from: str = field(default="", repr=False)

    @property
    def scale(self) -> float:
        """The factor of the output of an adapter."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Rematerialization, offloading to host memory and tiling; docs/memory.md gives what each saves
    and costs.
    """

    # rematerialization (activation checkpointing) of each layer. none: all activations are saved. attention: only the
    # layer input and the attention output are saved. matmuls: the results of matrix products are saved. full: only the
    # layer input is saved.
    remat: Literal["none", "full", "attention", "matmuls"] = "attention"
    # number of layers recomputed together; only the input of the group is saved
    layers_per_remat_group: From1[int] = 1
    # more tensors to save on the device, of residual, query, key, value, delta_states, attention_out, attention_lse,
    # attention_projected, mlp_gate, mlp_up.
    save: tuple[str, ...] = ()
    # tensors to save in pinned host memory instead of the device, same names as save
    offload: tuple[str, ...] = ()
    # memory of float32 parameters and gradients; host: pinned memory
    parameters: Literal["device", "host"] = "device"
    # memory of the optimizer moments; host: pinned memory
    optimizer: Literal["device", "host"] = "device"
    # number of neighboring devices that form a node, on a mesh of several nodes: once per step each node gathers a copy
    # of the weights in the compute dtype, from which its layers gather, and gradients cross nodes once per step. 0: no
    # copy; layers gather from all devices.
    node_copy_devices: int = 0
    # tokens per device that a layer processes at once; attention still uses all keys and values. A multiple of
    # 2 x mesh.tensor that divides data.seq_len / mesh.context. 0: all tokens at once.
    tile_tokens: int = 0
    # tokens per device whose logits are computed at once. 0: 1024, 2048 or 4096, the largest whose logits take at most
    # 4% of the device memory that the state leaves; 1024 on CPUs.
    loss_chunk_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Processes, devices, transport between GPUs and compiler options."""

    # number of CPU devices to simulate, over all processes; 0: use the real devices
    simulated_devices: int = 0
    # number of processes of the run; more than 1 uses jax.distributed. 0: from the launcher (Slurm, Open MPI,
    # Kubernetes, or JAX_NUM_PROCESSES; docs/clusters.md), and 1 without one.
    num_processes: int = 0
    # index of this process, from 0 to num_processes - 1; -1: from the launcher
    process_id: FromMinus1[int] = -1
    # host:port of process 0, reachable from all processes. Empty: from the launcher, and
    # 127.0.0.1:9753 without one.
    coordinator_address: str = ""
    # how long the processes wait for each other at the start
    start_timeout_seconds: From1[int] = 300
    # a machine that the network does not reach for this time counts as failed
    heartbeat_seconds: From1[int] = 100
    # a process whose phase, such as a step or a checkpoint, takes longer than this multiple of the median of its last
    # durations ends with status 75; docs/reliability.md. 0: no watchdog.
    watchdog_factor: ZeroOrAbove1[float] = 10.0
    # least deadline of the watchdog, and the limit for a process to answer
    watchdog_floor_seconds: From1[int] = 600
    # deadline of a phase of which fewer than five durations are known, such as the first steps; 0:
    # none.
    watchdog_first_seconds: int = 0
    # steps between measurements of slow processes and devices; docs/reliability.md. 0: none.
    straggler_every_steps: int = 100
    # a time that is longer than this multiple of the median is reported
    straggler_factor: Above1[float] = 1.5
    # target GPUs of this config, as NAME:DOMAINSxGPUS, such as h100:8x8; "": none
    topology: str = ""
    # how context-parallel sends and receives move between GPUs; docs/xla_flags.md. A named one that cannot be used is
    # an error.
    transport: Literal["auto", "nccl", "nvshmem", "symmetric", "peer"] = "auto"
    # what happens if the compiled step uses another transport than the requested one.
    transport_mismatch: Literal["error", "warn"] = "error"
    # size in bytes of the NVSHMEM heap on each GPU, which holds all NVSHMEM send and receive buffers. 0: NVSHMEM's
    # default of 1 GiB.
    nvshmem_heap_bytes: int = 0
    # directory of JAX's persistent compilation cache, from which a later equal run loads its compiled programs. auto:
    # JAX_COMPILATION_CACHE_DIR if it is set; otherwise $XDG_CACHE_HOME/jaxlc/xla for runs of one process, and none for
    # several, which need a directory that all of them share. "": none.
    compilation_cache_dir: str = "auto"
    # JAX's memory pool as a fraction of each GPU's memory. The rest is for NCCL, cuBLAS, the CUDA context and kernels.
    # XLA_CLIENT_MEM_FRACTION in the environment takes precedence.
    memory_fraction: Above0UpTo1[float] = 0.9
    # size in GiB of the pool of pinned host memory of each GPU, allocated at once. 0: what the training state and the
    # activations in host memory need. XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB in the environment takes precedence.
    pinned_host_gib: float = 0.0
    # GPU arrays may spill to host memory; for Grace Hopper and Grace Blackwell
    unified_memory: bool = False
    # JAX's memory pool as a multiple of GPU memory, with unified_memory. 0: so that the pools of all GPUs take 90% of
    # host memory in addition to GPU memory.
    unified_memory_fraction: ZeroOrAbove1[float] = 0.0
    # use only GPU kernels whose results are equal in every run of the same compiled program;
    # slower, docs/xla_flags.md.
    deterministic: bool = False
    # products of tokens with the experts that they are routed to; docs/experts.md. blocks: batched products of blocks
    # of tokens, on all devices. mosaic: JAX's kernels for Hopper, in bf16, as fast and with less memory. pallas: Triton
    # kernels for compute capability 8.0, 9.0 and 10.0, in bf16, with as little memory, never timed on a GPU. A run
    # compares both with blocks before it trains.
    expert_kernel: Literal["blocks", "mosaic", "pallas"] = "blocks"
    # the chunks of gated_delta_net layers; docs/architecture.md. xla: on all devices. pallas: kernels for GPUs (Triton)
    # with fewer launches and less memory traffic, never timed on a GPU; a run compares them with xla before it trains.
    delta_kernel: Literal["xla", "pallas"] = "xla"
    # compiler options for GPUs; docs/xla_flags.md.
    xla_preset: Literal[
        "default",
        "overlap",
        "pipelined",
        "double_buffered",
        "uncombined",
        "permute_cliques",
        "no_graphs",
        "no_triton_gemm",
    ] = "overlap"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch size, evaluation, checkpoints and logging."""

    # number of optimizer steps, including earlier runs in the same workdir; or set tokens or epochs instead
    steps: From1[int] = 100
    # the same in tokens, padding included, rounded up to whole steps, such as 1e9; 0: from steps or epochs
    tokens: int = 0
    # the same in epochs of the corpus, of the mixture or of the traces, rounded up to whole steps; docs/data.md. The
    # steps are known when the data is read, and stored with the run. 0: from steps or tokens
    epochs: float = 0.0
    global_batch_size: From1[int] = 1  # sequences per optimizer step, over all devices
    # number of microbatches that a step processes one after the other; divides the batch size per
    # replica.
    gradient_accumulation_steps: From1[int] = 1
    seed: int = 0  # random seed of the initial parameters
    # parameters to train, named as in the table of shardings that a run prints; * stands for any characters: *norm* is
    # all norms. The other parameters are frozen: they have no gradients and no optimizer state. Adapters of LoRA are
    # always trained. Empty: all parameters; with lora.rank, only the adapters.
    trainable: tuple[str, ...] = ()
    # parameters to freeze although train.trainable selects them; patterns as there
    frozen: tuple[str, ...] = ()
    # coefficient of mean(log(Z)^2), Z the softmax normalizer (PaLM, section 5); 0: none
    z_loss: float = 0.0
    # coefficient of the loss that balances the load of experts; "router_aux_loss_coef" in
    # config.json; 0: none.
    balance_loss: float = 0.0
    # the products of the balance loss. layers: of sums over all layers, as in transformers. layer: of each layer, as in
    # Megatron-LM; the loss is their mean.
    balance_loss_over: Literal["layers", "layer"] = "layers"
    # sigmoid router: what a step adds to the bias of an expert with fewer assignments than the mean, and subtracts from
    # that of one with more (DeepSeek V3, arXiv:2412.19437, section 2.1.2; 0.001 there); 0: biases do not change.
    balance_bias_rate: float = 0.0
    # coefficient of the mean of log(Z)^2, Z the normalizer of the router; 0: none
    router_z_loss: float = 0.0
    # what happens at a NaN or infinite loss or gradient. stop: the run ends. skip: the update is
    # skipped.
    nonfinite: Literal["stop", "skip"] = "stop"
    eval_every_steps: int = 0  # steps between evaluations; 0: at the end only
    # held-out sequences per evaluation, a multiple of mesh.data x mesh.fsdp. 0: no evaluation, and nothing is held out
    # by data.eval_fraction
    eval_sequences: int = 4
    # number of evaluations without a new lowest held-out loss after which the run stops; 0: it does
    # not stop early.
    early_stop_evals: int = 0
    # steps between texts that the run generates for sample_prompts, after the checkpoint of the step; printed, written
    # to WORKDIR/samples, and sent to TensorBoard and Weights & Biases. 0: none.
    sample_every_steps: int = 0
    # texts to continue, separated by commas on the command line
    sample_prompts: tuple[str, ...] = ()
    sample_tokens: From1[int] = 128  # largest number of new tokens of each prompt
    # of the samples; the most likely tokens, of 90% of the probability, are chosen from. 0: greedy
    sample_temperature: float = 0.7
    # sample_prompts are messages of a user, in the chat template of the tokenizer or data.chat_template
    sample_chat: bool = False
    checkpoint_every_steps: int = 0  # steps between checkpoints; 0: at the end only
    keep_checkpoints: From1[int] = 2  # number of latest checkpoints to keep
    # checkpoints of steps that are multiples of this number are kept as well; 0: none
    keep_every_steps: int = 0
    # number of checkpoints with the lowest held-out loss, in each stage, that are kept as well. It needs an evaluation
    # at the step of each checkpoint; a checkpoint that waits for its evaluation is kept, too.
    keep_best_checkpoints: int = 0
    # directory on a disk of each machine, or in its memory as /dev/shm/jaxlc, for local checkpoints with a period of
    # their own: every process writes its own parts of the arrays there. A run resumes from the latest one that all
    # processes have, on the same mesh, unless there is a later one in the workdir. "": none.
    local_checkpoints: str = ""
    local_checkpoint_every_steps: int = 0  # steps between local checkpoints
    # store frozen parameters in checkpoints. False: small checkpoints, which need the base model: model.init_from, or
    # without it the initial values of train.seed. Their fingerprint is checked.
    checkpoint_frozen: bool = True
    # steps between fetching metrics and writing a row of metrics.jsonl
    log_every_steps: From1[int] = 1
    # project of Weights & Biases that gets the metrics too; "": none. WANDB_MODE=offline works
    wandb_project: str = ""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Profiles of training steps, written to WORKDIR/profile; docs/profiling.md."""

    # optimizer steps to trace, as FIRST:END without END: 10:13 traces steps 10, 11 and 12. "":
    # none.
    steps: str = ""
    # xprof: jax.profiler writes a trace. nsys: calls cudaProfilerStart and cudaProfilerStop around the steps, for a run
    # inside `nsys profile --capture-range=cudaProfilerApi`.
    tool: Literal["xprof", "nsys"] = "xprof"
    # processes that trace; each GPU's work is traced by its own process
    processes: Literal["first", "all"] = "first"

    @property
    def traced_steps(self) -> range:
        first, _, end = self.steps.partition(":")
        return range(int(first), int(end)) if self.steps else range(0)


# The 13 tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654).
RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are chosen; also the flags of the verbs that sample a text."""

    temperature: float = (
        0.0  # logits are divided by it; 0: greedy, the token with the largest logit
    )
    # sample from the smallest set of tokens with at least this probability (Holtzman et al. 2020)
    top_p: Above0UpTo1[float] = 1.0
    top_k: int = 0  # sample from this many likeliest tokens; 0: from all
    # sample from tokens with at least this fraction of the largest probability (Nguyen et al. 2024,
    # arXiv:2407.01082); 0: from all
    min_p: From0UpTo1[float] = 0.0
    # positive logits of tokens of the prompt and the text are divided by it, negative ones multiplied (Keskar et al.
    # 2019, arXiv:1909.05858); log-probabilities are of these logits. 1: none
    repetition_penalty: Above0[float] = 1.0
    seed: Below2To32[int] = 0  # random seed


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """An evaluation: scores of tasks and losses of documents at chosen context lengths."""

    # needle, passkey, loss, ruler (all tasks of RULER), or names of RULER's tasks. Empty: no
    # scores.
    tasks: tuple[str, ...] = ()
    # context lengths in tokens; new tokens of the answer count. Empty: data.seq_len
    lengths: tuple[Tokens, ...] = ()
    # examples of each task and length, and of each depth; documents of loss
    num_examples: From1[int] = 20
    # needle, passkey: from 0 (start) to 1 (end of the text)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    num_needles: From1To12[int] = 1  # needle: numbers in a text, of which one is asked for
    # files with prose that fills the prompts, separated by commas. Empty: docstrings of Python's
    # standard library.
    haystack: tuple[str, ...] = ()
    squad: str = ""  # SQuAD 2.0 file, for qa_1
    hotpotqa: str = ""  # HotpotQA file, for qa_2
    # loss: files, directories or glob patterns, separated by commas
    documents: tuple[str, ...] = ()
    text_field: str = "text"  # loss: field of records that holds the document
    # loss: numbers of tokens that the limited context has, for the gain of full context.
    context_limits: tuple[Tokens, ...] = (Tokens(1024),)
    # prompts are messages of a user, in the chat template of the tokenizer or data.chat_template
    chat: bool = False
    batch_size: From1[int] = 1  # examples that are computed together
    seed: int = 42  # random seed of the examples


@dataclass(frozen=True, kw_only=True)
class EvalsConfig(EvalSettings):
    """Scores of tasks and losses of documents at chosen context lengths, during training;
    docs/evaluation.md.
    """

    # steps between evaluations, which start before the first step; 0: only at the end of the run or
    # stage.
    every_steps: int = 0


CHAT_TEMPLATES = ("chatml", "llama3")  # names that data.chat_template knows


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of data.mixture."""

    name: str  # NAME in config.data.mixture.NAME
    # files, directories or glob patterns, as data.sources.
    paths: tuple[str, ...] = ()
    # share of the tokens of a run, padding not counted. Shares are divided by their sum.
    share: float = 1.0
    # packed: documents and remainders of long ones are packed into sequences. full_length: only documents of at least
    # data.seq_len tokens, cut into sequences of one document each; remainders are not used.
    pool: Literal["packed", "full_length"] = "packed"
    # pool packed: documents are cut into chunks of at most this number of tokens before they are packed, such as 65536
    # in sequences of 524288. 0: data.seq_len.
    chunk_tokens: int = 0
    min_tokens: int = 0  # shorter documents are not used; lengths include the end-of-document token
    max_tokens: int = 0  # longer documents are not used; 0: no limit
    # limits in tokens between length classes, increasing, for length_weights.
    length_limits: tuple[int, ...] = ()
    # weight of the documents of each length class, one more than length_limits: 1,2.5 with length_limits=8192 repeats
    # documents of at least 8192 tokens 2.5 times per epoch. 0: not used. Empty: 1.
    length_weights: tuple[float, ...] = ()
    # documents longer than a sequence. cut: into several chunks. truncate: only the first data.seq_len tokens are used.
    # drop: not used. auto: cut, and drop for chats.
    overlong: Literal["auto", "cut", "truncate", "drop"] = "auto"
    # field of records that holds the document; dots name fields of fields, such as data.text.
    text_field: str = "text"
    # field of records that holds token IDs, such as input_ids, instead of text; "tokens" in .idx
    # files of Megatron-LM.
    token_field: str = ""
    # field of records that holds a chat, rendered with the chat template. Only the answers of the assistant are trained
    # on. Empty: that of chat_format, or no chats without chat_format.
    chat_field: str = ""
    # messages: a list of messages with role and content, in the field messages. sharegpt: a list of turns with from and
    # value, in the field conversations. alpaca: the fields instruction, input and output. completion: the fields prompt
    # and completion, texts or lists of messages. Empty: messages.
    chat_format: Literal["", "messages", "sharegpt", "alpaca", "completion"] = ""
    # chats: weight of a token of an answer. token: 1. answer: the same sum for each answer, 1 on
    # average.
    answer_weights: Literal["token", "answer"] = "token"
    # suffixes of more files that are one document each, such as .tex; "code" adds those of
    # programs.
    text_suffixes: tuple[str, ...] = ()

    @property
    def has_chats(self) -> bool:
        return bool(self.chat_field or self.chat_format)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Text sources, tokenizer and packing into sequences."""

    # files, directories or glob patterns, separated by commas, of .txt, .py, .md, .rst, .jsonl, .ndjson, .jsonl.gz,
    # .jsonl.zst, .parquet and .arrow files; hub:ORGANIZATION/NAME@REVISION/SUBSET/SPLIT, a data set of the Hugging Face
    # hub; "python-stdlib", the sources of Python's standard library; or "phone-book", documents of data.seq_len words
    # that repeat numbers.
    sources: tuple[str, ...] = ("python-stdlib",)
    # named sources with shares of the tokens, instead of data.sources; docs/data.md. Set the fields of a source with
    # config.data.mixture.NAME.FIELD; a new NAME adds a source.
    mixture: tuple[SourceConfig, ...] = ()
    # files, directories or glob patterns of traces, instead of data.sources: prompts with their answers, for supervised
    # fine-tuning of several answers and for config.posttrain; docs/post_training.md.
    traces: tuple[str, ...] = ()
    # what happens to traces longer than a sequence
    overlong_traces: Literal["error", "drop", "truncate"] = "error"
    # attention.shared_prefixes > 1: a token in the loss of several traces counts for each (leaf), or once (node)
    shared_tokens: Literal["leaf", "node"] = "leaf"
    # "bytes" (257 ids), the path of a Hugging Face tokenizer.json or of a directory that contains one, or a hub id
    # ORGANIZATION/NAME. If it is not set: the tokenizer of model.init_from, or bytes without it.
    tokenizer: str = "bytes"
    # text of the token that ends each document, such as <|im_end|>. Empty: chosen from the special tokens of the
    # tokenizer, such as <|end_of_text|>, <|endoftext|> or </s>, or its eos_token.
    end_token: str = ""
    # True: the text of a special token, such as <|im_end|>, in documents, prompts and answers is encoded as this token.
    # False: it is text; a warning has the number of such texts. In a rendered chat it is always the token.
    parse_special_tokens: bool = False
    # text of the token that each document and each prompt of plain text starts with. auto: the tokens that transformers
    # puts there, such as <|begin_of_text|> of Llama 3 and <bos> of Gemma; of a run in model.init_from, its setting.
    # "bytes" has none. Empty: none. Chats start as their template says. A run that resumes keeps its first setting.
    start_token: str = "auto"
    # sequence length in tokens, over all context ranks, such as 131072 or 128K; documents are
    # packed into sequences.
    seq_len: Tokens = Tokens(4096)
    # field of records that holds the document; dots name fields of fields, such as data.text.
    text_field: str = "text"
    # most records of a source without a usable document, which are skipped with a warning.
    max_bad_records: int = 0
    # template of chats: "chatml", "llama3", a Jinja file, or its text. Empty: that of the run in model.init_from, or of
    # the tokenizer.
    chat_template: str = ""
    # fraction of documents held out for evaluation, selected by a hash of their names. With too few documents, this
    # fraction of the longest one, at its end.
    eval_fraction: Between0And1[float] = 0.05
    # sources for evaluation, as data.sources. Their files are not trained on, and eval_fraction has no effect. Empty:
    # eval_fraction of data.sources.
    eval_sources: tuple[str, ...] = ()
    # eval_sources: they are chats in this format, as chat_format of a source; only answers have a loss. Empty: text, or
    # chats in the format messages with eval_chat_field.
    eval_chat_format: Literal["", "messages", "sharegpt", "alpaca", "completion"] = ""
    # eval_sources: field of records that holds a chat. Empty: the usual field of eval_chat_format
    eval_chat_field: str = ""
    seed: int = 0  # random seed of the order of sequences
    cache_dir: str = "~/.cache/jaxlc"  # directory where tokenized corpora are stored
    # number of processes that tokenize a corpus of more than 64 MB; 0: one per CPU core.
    tokenizing_processes: int = 0
    prefetch_steps: int = 2  # number of batches prepared in advance; 0: none
    # read data.sources, or a mixture of one source, in chunks during training, for a corpus larger than the disk. Files
    # may also be URLs, such as s3://BUCKET/DIRECTORY; docs/data.md.
    stream: bool = False
    # largest size of a stream's chunks in data.cache_dir, for each process. A chunk has 32 to 64 MiB of text for each
    # GiB of it.
    stream_cache_gib: Above0[float] = 2.0


@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig:
    """The sections of a config except the model."""

    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    attention: AttentionConfig = AttentionConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    memory: MemoryConfig = MemoryConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    train: TrainConfig = TrainConfig()
    profile: ProfileConfig = ProfileConfig()
    evals: EvalsConfig = EvalsConfig()
    posttrain: PosttrainConfig = PosttrainConfig()
    rollouts: RolloutsConfig = RolloutsConfig()

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all devices, padding included."""
        return self.train.global_batch_size * self.data.seq_len
