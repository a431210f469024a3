"""Model FLOPs and parameter counts of a decoder: every rate and utilisation that is printed starts here.

Model FLOPs are what the mathematics needs, whatever the program does: recomputation is not counted (that would
be *hardware* FLOPs), nor are norms, RoPE, softmax and the optimizer, which are not matrix products.

Matrix products. A weight matrix of P entries costs 2 P FLOPs a token (a multiplication and an addition), and
its backward twice that (the gradients of input and weight): 6 P a token. The embedding is a lookup and costs
nothing; the output head is a product, also where it is the embedding transposed.

Attention. A query against one key costs 2 H FLOPs for q . k and 2 H for the value, in each of N heads:
4 N H a pair forward, and twice that backward: 12 N H a pair. Pairs in a row of T tokens:

    full     T^2            the convention of Megatron-LM and PaLM (appendix B): 12 L N H T a token
    causal   T (T + 1) / 2  what a causal mask leaves: half

Document packing is ignored: a packed row needs fewer pairs than either says, so where documents are shorter than
rows the attention share, and with it the rate, is overstated. State the form with every figure.
"""

from typing import Literal, Protocol


class DecoderShape(Protocol):
    """What is read of a model; `jaxlc.config.ModelConfig` is one."""

    vocab_size: int
    num_layers: int
    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    tie_embeddings: bool
    qk_norm: bool


def training_flops(model: DecoderShape, *, rows: int, seq_len: int, attention: Literal["causal", "full"]) -> float:
    """Model FLOPs of one optimizer step over `rows` rows of `seq_len`, forward and backward, all devices."""
    pairs = {"full": seq_len**2, "causal": seq_len * (seq_len + 1) / 2}[attention]
    attention_flops = 12.0 * model.num_layers * model.num_heads * model.head_dim * pairs
    return rows * (6.0 * num_matmul_params(model) * seq_len + attention_flops)


def num_matmul_params(model: DecoderShape) -> int:
    """Entries of all matrices that tokens are multiplied by: of the layers, and of the output head."""
    attention = model.model_dim * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)  # q and o, k and v
    feed_forward = 3 * model.model_dim * model.ffn_dim  # gate, up and down
    return model.num_layers * (attention + feed_forward) + model.model_dim * model.vocab_size


def num_params(model: DecoderShape) -> int:
    """All parameters, without the padding of the vocabulary."""
    norms = 2 * model.model_dim + (2 * model.head_dim if model.qk_norm else 0)
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.model_dim  # tied: counted as the head
    return num_matmul_params(model) + embedding + model.num_layers * norms + model.model_dim
