"""Part recurrence: the gated delta rule by the forms of config.runtime.delta_kernel."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.first_contact.attention_inputs import seconds_per_call
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from jaxlc.attention.recurrence import chunks
from jaxlc.attention.recurrence.chunks import Rule, Tokens
from jaxlc.attention.recurrence.sharded_rule import check_kernel, random_tokens

_KERNELS = "xla", "pallas"


def recurrence_rows(sizes: Sizes) -> Iterator[Row]:
    """A check as before a run, the errors of both forms, and their times in turn."""
    yield Row(
        labels=dict(name="check", kernel="pallas"),
        measure=functools.partial(_check, sizes),
        seconds=60,
    )
    for kernel in _KERNELS:
        measure = functools.partial(_errors, sizes, kernel)
        yield Row(labels=dict(name="errors", kernel=kernel), measure=measure, seconds=60)
    for which in ("forward", "both"):
        for kernel in _KERNELS:
            measure = functools.partial(_time, sizes, kernel, which)
            labels = dict(name="rule", kernel=kernel, which=which)
            yield Row(labels=labels, measure=measure, seconds=60)


def _check(sizes: Sizes) -> dict:
    dim = sizes.recurrence[-1]
    device = jax.devices()[0]
    dtype = sizes.dtype
    line = check_kernel(device, key_dim=dim, value_dim=dim, dtype=dtype)
    return dict(result=line)


def _arrays(sizes: Sizes, num_tokens: int) -> tuple[jax.Array, ...]:
    """q, k, v, g, beta and a state."""
    _, key_heads, heads, dim = sizes.recurrence
    return random_tokens(num_tokens, key_heads, heads, dim, dim, sizes.dtype)


def _outputs(q, k, v, g, beta, S, *, kernel: str) -> jax.Array:
    segments = 1 + (jnp.arange(q.shape[1], dtype=jnp.int32) // (q.shape[1] // 3))[None]
    tokens = Tokens(q, k, v, g, beta, None, segments, jnp.ones(1, jnp.int32))
    rule = Rule(q.shape[-1] ** -0.5, uses_kernel=kernel == "pallas")
    return chunks.outputs(tokens, S, rule)[0]


def _both(*arrays, kernel: str) -> tuple[jax.Array, ...]:
    """The outputs and all gradients, with recomputation."""
    run = jax.checkpoint(functools.partial(_outputs, kernel=kernel))
    out, vjp = jax.vjp(run, *arrays)
    return out, *vjp(out)


def _errors(sizes: Sizes, kernel: str) -> dict:
    """Of some tokens, relative to the XLA form in float64."""
    arrays = _arrays(sizes, min(sizes.recurrence[0], 8 * chunks.CHUNK_TOKENS))
    actual = jax.jit(functools.partial(_both, kernel=kernel))(*arrays)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in arrays]
        exact = jax.jit(functools.partial(_both, kernel="xla"))(*wide)
        pairs = zip(("out", "dq", "dk", "dv", "dg", "dbeta", "dstate"), actual, exact)
        return {name: float(abs(a - b).max() / abs(b).max()) for name, a, b in pairs}


def _time(sizes: Sizes, kernel: str, which: str) -> dict:
    """Each call depends on the last, through a part of its result."""
    q, *others = _arrays(sizes, sizes.recurrence[0])
    run = functools.partial(_outputs if which == "forward" else _both, kernel=kernel)

    def step(carry, *others):
        results = jax.tree.leaves(run(carry[0], *others))
        return carry[0].at[..., 0].add(1e-3 * results[0][:, :, : q.shape[2], 0]), results

    timing = dict(num_calls=sizes.num_calls, repeats=sizes.repeats)
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(run, q, *others))
    carry = q, jax.tree.leaves(results)
    return dict(seconds=seconds_per_call(step, carry, *others, **timing))
