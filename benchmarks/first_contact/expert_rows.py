"""Part experts: products of routed rows with their experts, by the kernels of
config.runtime.expert_kernel.
"""

import functools
from collections.abc import Iterator

import jax

from benchmarks.first_contact.attention_inputs import device_or_h100, seconds_per_call
from benchmarks.first_contact.rows import Row
from benchmarks.first_contact.sizes import Sizes
from jaxlc.models.expert_products import PRODUCTS, assign, check_product


def expert_rows(sizes: Sizes) -> Iterator[Row]:
    """The Mosaic kernels need a Hopper GPU: a dry run has none of them."""
    kernels = ("pallas", "blocks") if sizes.is_dry_run else ("mosaic", "pallas", "blocks")
    for kernel in kernels[:-1]:
        measure = functools.partial(_check, sizes, kernel)
        yield Row(labels=dict(name="check", kernel=kernel), measure=measure, seconds=40)
    for kernel in kernels:
        for which in ("forward", "backward"):
            measure = functools.partial(_rate, sizes, kernel, which)
            yield Row(
                labels=dict(name="product", kernel=kernel, which=which), measure=measure, seconds=40
            )


def _check(sizes: Sizes, kernel: str) -> dict:
    num_experts, model_dim, ffn_dim, _, _ = sizes.experts
    sizes_of_experts = dict(num_experts=num_experts, model_dim=model_dim, ffn_dim=ffn_dim)
    return dict(result=check_product(kernel, jax.devices()[0], **sizes_of_experts))


def _rate(sizes: Sizes, kernel: str, which: str) -> dict:
    """FLOPs count all rows, padding included. Each call depends on the last, through a part of its
    result.
    """
    num_experts, model_dim, ffn_dim, num_tokens, num_chosen = sizes.experts
    keys = jax.random.split(jax.random.key(0), 4)
    scores_TE = jax.random.uniform(keys[0], (num_tokens, num_experts))
    assignments = assign(jax.lax.top_k(scores_TE, num_chosen)[1], num_experts, kernel)
    rows = len(assignments.expert_n), assignments.block_rows
    x_nmD = jax.random.normal(keys[1], (*rows, model_dim), sizes.dtype)
    w_EDF = jax.random.normal(keys[2], (num_experts, model_dim, ffn_dim), sizes.dtype)
    dout_nmF = jax.random.normal(keys[3], (*rows, ffn_dim), sizes.dtype)

    def forward(carry, w_EDF, expert_n):
        x_nmD, _ = carry
        out_nmF = PRODUCTS[kernel](x_nmD, w_EDF, expert_n)
        return x_nmD.at[..., 0].add(1e-3 * out_nmF[..., 0]), out_nmF

    def backward(carry, x_nmD, w_EDF, expert_n):
        dout_nmF, *_ = carry
        dx_nmD, dw_EDF = jax.vjp(lambda x, w: PRODUCTS[kernel](x, w, expert_n), x_nmD, w_EDF)[1](
            dout_nmF
        )
        return dout_nmF.at[..., 0].add(1e-3 * dx_nmD[..., 0]), dx_nmD, dw_EDF

    timing = dict(num_calls=sizes.num_calls, repeats=sizes.repeats)
    if which == "forward":
        seconds = seconds_per_call(
            forward, (x_nmD, dout_nmF), w_EDF, assignments.expert_n, **timing
        )
    else:
        carry = dout_nmF, x_nmD, w_EDF
        seconds = seconds_per_call(backward, carry, x_nmD, w_EDF, assignments.expert_n, **timing)
    num_products = 1 if which == "forward" else 2
    flops = num_products * 2.0 * rows[0] * rows[1] * model_dim * ffn_dim
    share = flops / seconds / device_or_h100().bf16_flops_per_second
    return dict(seconds=seconds, tflops=flops / seconds / 1e12, share=share, rows=rows[0] * rows[1])
