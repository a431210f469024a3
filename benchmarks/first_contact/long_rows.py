"""Parts workspace and long: what cuDNN allocates, and whether kernels are right where an array has
2^31 elements.
"""

import functools
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.first_contact.attention_inputs import both_passes, random_inputs, supported_kernels
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Heads, Sizes
from jaxlc.attention.contract import AttentionSpec
from jaxlc.attention.kernels import cudnn
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.simulate.topology import has_gpu_compiler, options_without_gpu, topology

# The last result of a call is its workspace, whose size the compiler writes where a GPU is
# attached.
_WORKSPACE = re.compile(r"u8\[(\d+)\][^)\n]*\) custom-call\(.*__cudnn\$fmha(\w+)")


def workspace_rows(sizes: Sizes) -> Iterator[Row]:
    for heads in sizes.workspace_heads:
        for num_tokens in sizes.workspace_tokens:
            labels = dict(kernel="cudnn", heads=str(heads), tokens=num_tokens)
            yield Row(
                labels=labels, measure=functools.partial(_workspace, heads, num_tokens), seconds=8
            )


def _workspace(heads: Heads, num_tokens: int) -> dict:
    """Compiles both passes; without a GPU for an absent one, where the compiler writes 0."""
    devices, options = _gpus()
    if devices is None:
        return dict(skipped="no GPU, and no GPU compiler")
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())
    counts = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
    inputs = [
        jax.ShapeDtypeStruct(
            (1, num_tokens, count, heads.head_dim), jnp.bfloat16, sharding=sharding
        )
        for count in counts
    ]
    both = functools.partial(both_passes, cudnn, AttentionSpec(), None)
    text = jax.jit(both).lower(*inputs).compile(compiler_options=options).as_text()
    measured = workspaces(text)
    shapes = [x.shape for x in inputs[:2]]
    return dict(measured_bytes=measured, stated_bytes=cudnn.workspace_bytes(*shapes, backward=True))


def _gpus() -> tuple[list[jax.Device] | None, dict]:
    if jax.devices()[0].platform == "gpu":
        return jax.devices(), {}
    if not has_gpu_compiler():
        return None, {}
    return topology("h100:1x1").devices, options_without_gpu("bf16")


def workspaces(text: str) -> dict[str, int]:
    """The largest workspace in bytes of each kind of cuDNN attention call in the text of a compiled
    program.
    """
    sizes: dict[str, int] = {}
    for match in _WORKSPACE.finditer(text):
        sizes[match[2]] = max(sizes.get(match[2], 0), int(match[1]))
    return sizes


def long_rows(sizes: Sizes) -> Iterator[Row]:
    for num_tokens, heads in sizes.long_cases:
        for name in supported_kernels(heads, sizes.dtype):
            if name != "blockwise" or num_tokens <= sizes.blockwise_max_tokens:
                labels = dict(kernel=name, heads=str(heads), tokens=num_tokens)
                yield Row(labels=labels, measure=functools.partial(_sampled_errors, sizes, name, num_tokens, heads),
                          seconds=45)  # fmt: skip


def _sampled_errors(sizes: Sizes, name: str, num_tokens: int, heads: Heads) -> dict:
    """Relative norms of the errors at some queries (out, lse, dq) and at some keys (dk, dv).

    The expected values are computed for the sampled tokens only, head by head. The expected
    gradients use out and lse of the kernel, which are checked themselves.
    """
    q, k, v, dout = random_inputs(heads, num_tokens, sizes.dtype)
    run = jax.jit(functools.partial(both_passes, KERNELS[name], AttentionSpec(), None))
    out, lse, dq, dk, dv = run(q, k, v, dout)
    tokens = jnp.sort(
        jax.random.choice(jax.random.key(2), num_tokens, (sizes.num_sampled,), replace=False)
    )
    tokens = tokens.at[-1].set(num_tokens - 1)
    expected = (
        _at_queries(q, k, v, out, dout, lse, tokens),
        _at_keys(q, k, v, out, dout, lse, tokens),
    )
    actual = (out[:, tokens], lse[:, :, tokens], dq[:, tokens]), (dk[:, tokens], dv[:, tokens])
    names = ("out", "lse", "dq"), ("dk", "dv")
    errors = {}
    for group in zip(names, actual, expected):
        for part, a, b in zip(*group):
            errors[part] = float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel()))
    return errors | dict(elements=int(np.prod(q.shape)), passed=max(errors.values()) < 1e-2)


def _heads_of(q, k, v, out, dout, lse):
    """Operands with the head first, for `lax.map`; keys and values once per query head."""
    repeats = q.shape[2] // k.shape[2]
    q, out, dout = (x[0].swapaxes(0, 1) for x in (q, out, dout))
    k, v = (jnp.repeat(x[0].swapaxes(0, 1), repeats, axis=0) for x in (k, v))
    return q, k, v, out, dout, lse[0]


@jax.jit
def _at_queries(q, k, v, out, dout, lse, tokens):
    """(out, lse, dq) of some queries, float32."""
    scale = q.shape[-1] ** -0.5

    def one_head(operands):
        q, k, v, out, dout, lse = operands
        q_s, out_s, dout_s = (x[tokens].astype(jnp.float32) for x in (q, out, dout))
        scores = jnp.where(jnp.arange(len(k)) <= tokens[:, None], scale * _dot(q_s, k.T), -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        delta = (dout_s * out_s).sum(-1, keepdims=True)
        kernel_weights = jnp.exp(scores - lse[tokens][:, None])
        dscores = kernel_weights * (_dot(dout_s, v.T) - delta)
        return _dot(weights, v), jax.nn.logsumexp(scores, axis=-1), scale * _dot(dscores, k)

    out, lse, dq = lax.map(one_head, _heads_of(q, k, v, out, dout, lse))
    return out.swapaxes(0, 1)[None], lse[None], dq.swapaxes(0, 1)[None]


@jax.jit
def _at_keys(q, k, v, out, dout, lse, tokens):
    """(dk, dv) of some keys, float32, summed over the query heads that share a key head."""
    num_kv_heads, scale = k.shape[2], q.shape[-1] ** -0.5

    def one_head(operands):
        q, k, v, out, dout, lse = operands
        k_s, v_s = (x[tokens].astype(jnp.float32) for x in (k, v))
        scores = scale * _dot(k_s, q.T)
        is_visible = jnp.arange(len(q)) >= tokens[:, None]
        weights = jnp.where(is_visible, jnp.exp(scores - lse), 0)
        delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
        dscores = weights * (_dot(v_s, dout.T) - delta)
        return scale * _dot(dscores, q), _dot(weights, dout)

    grads = lax.map(one_head, _heads_of(q, k, v, out, dout, lse))
    return tuple(
        x.reshape(num_kv_heads, -1, *x.shape[1:]).sum(1).swapaxes(0, 1)[None] for x in grads
    )


def _dot(a, b):
    return jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
