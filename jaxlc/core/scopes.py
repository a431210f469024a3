"""Names for `jax.named_scope`: profiles, the analysis of compiled programs and the plan page use
the same ones.

A scope becomes one component of an instruction's `op_name` path, such as
"jit(_step)/jvp()/while/body/attention/ core_attention/ring_step/...". JAX adds marks of its own
transformations, e.g. "transpose(jvp(loss))".
"""

# Parts of the model.
EMBEDDING = "embedding"  # token embedding lookup
# attention block of a layer: norms, projections, RoPE, core attention, output projection
ATTENTION = "attention"
# what runs inside attention's shard_map: kernels and exchanges over the context axis
CORE_ATTENTION = "core_attention"
MLP = "mlp"  # MLP block of a layer: norms and the gated feed-forward layer
ROUTER = "router"  # inside MLP: logits of the experts and the choice of some
EXPERTS = "experts"  # inside MLP: rows sorted by expert, and the products of experts
MIXTURE = (ROUTER, EXPERTS)
# inside ATTENTION and MLP: an adapter, with the sum of its output and the frozen projection's
LORA = "lora"
# cast of a stored weight, and its all-gather over the axes that shard it
GATHER_WEIGHTS = "gather_weights"

# Exchanges over the context axis, inside CORE_ATTENTION.
RING_STEP = "ring_step"  # attention to one KV block of another rank
# steps 0 and 1 where no document needs the others; instead of all steps
FIRST_RING_STEPS = "first_ring_steps"
RING_SEND = "ring_send"  # collective permute of a KV block, or of its gradients, to the next rank
# all-gather of K and V; in the backward pass also the reduce-scatter of dK and dV
ALL_GATHER_KV = "all_gather_kv"
EXPANSION = "latent_expansion"  # keys and values of all heads, from latents
ALL_TO_ALL = "all_to_all_heads"  # Ulysses: exchange of heads for tokens, and back
SLIDING_WINDOW = "sliding_window"  # attention with a window, exchanges included
KV_CACHE = "kv_cache"  # generation: the update of the KV cache, and attention to the tokens in it
WINDOW_HALO = "window_halo"  # sliding windows: exchange of the tokens before each chunk
SHARED_PREFIX = "shared_prefix"  # attention of branches to the prefix that they continue
# loop over calls of packed attention; runs if one call cannot take all documents
MORE_DOCUMENTS = "more_documents"
REORDER = "zigzag_reorder"  # exchanges chunks: natural to zigzag order, and back

# Linear attention.
LINEAR_ATTENTION = "linear_attention"  # recurrence over the sequence, exchanges included
# inside LINEAR_ATTENTION: exchange of the maps of states between ranks
DELTA_STATES = "delta_states"
CONVOLUTION = "short_convolution"  # causal convolution over the sequence, exchange included
RECURRENCE = (LINEAR_ATTENTION, DELTA_STATES, CONVOLUTION)

# Calls of tokamax's kernels, whose custom calls have no name.
MOSAIC_FORWARD = "mosaic_forward"
MOSAIC_BACKWARD = "mosaic_backward"  # a call with one result computes dq, one with two dk and dv
MOSAIC_CAUSAL = "mosaic_causal"  # inside one of these: a call that is causal by index
MOSAIC_PAIRS = "mosaic_pairs"  # the loop of the backward over pairs of a query block and a KV block

# Training step.
LOSS = "loss"  # final norm, output head and cross entropy
LOGITS = "logits"  # inside LOSS: logits of a chunk of tokens, and their gradient
# inside LOSS: gradient of the output head, summed over chunks and ranks
HEAD_GRADIENT = "head_gradient"
ACCUMULATE_GRADIENTS = "accumulate_gradients"  # sum of gradients over microbatches
GATHER_NODE_COPY = "gather_node_copy"  # of weights, across nodes, once per step
SUM_OVER_NODES = "sum_over_nodes"  # of the gradients of this copy, once per step
GRADIENT_NORM = "gradient_norm"  # global norm of the gradients
OPTIMIZER = "optimizer"  # optimizer update

# Host memory.
PREFETCH = "prefetch_weights"  # copy of the next layer's weights from host memory to the device
# copy of a layer's weight gradients from the device to host memory
OFFLOAD_GRADIENTS = "offload_gradients"
# copies of weights, gradients and moments around a streamed optimizer update
HOST_STATE = "host_state"

SCOPES = frozenset(
    value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str)
)
