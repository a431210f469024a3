"""Converts measured rows to the constants that `jaxlc plan --constants` reads
(jaxlc/simulate/roofline.py).
"""

import statistics
from collections.abc import Iterable
from typing import Any

# Matrix products of a backward kernel's program per pair of query and key, over the five that rates count: pallas and
# mosaic compute the scores and the gradient of the weights twice (jaxlc/hlo/kernel_costs.py).
_BACKWARD_PRODUCTS = {"cudnn": 5 / 5, "pallas": 7 / 5, "mosaic": 7 / 5, "blockwise": 5 / 5}
_Rows = list[dict[str, Any]]


def from_rows(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The constants that `rows` measured; keys without a measurement are absent, so that the
    defaults remain.

    There is none for FP8 products: their rows include the casts of the operands, which plans price
    as kernels.
    """
    rows = [row for row in rows if "error" not in row and "skipped" not in row]
    attention_share = _attention(_of(rows, "rates", causal=True))
    packed_share = _attention(_of(rows, "rates", packed="causal"))
    if "cudnn" in packed_share:
        attention_share["cudnn_packed"] = packed_share["cudnn"]
    constants: dict[str, Any] = dict(attention_share=attention_share)
    shares = {
        "matmul_share": _of(rows, "basics", name="product", dtype="bf16"),
        "expert_kernel_share": _of(rows, "experts", name="product", kernel="mosaic"),
        "memory_share": _of(rows, "basics", name="device copy"),
        "host_share": _of(
            rows,
            "host",
            name="copy",
            direction="from host",
            index="loop counter",
            with_attention=False,
        ),
    }
    for name, measured in shares.items():
        if measured:
            constants[name] = statistics.median(row["share"] for row in measured)
    for row in _of(rows, "basics", name="small kernels"):
        constants["kernel_gap_seconds"] = row["graph_seconds"]
    for row in _of(rows, "basics", name="synchronization"):
        constants["synchronization_seconds"] = max(0.0, row["seconds"])
    return {name: value for name, value in constants.items() if value}


def _of(rows: _Rows, part: str, **labels: Any) -> _Rows:
    all_labels = dict(part=part, **labels)
    return [
        row for row in rows if all(row.get(name) == value for name, value in all_labels.items())
    ]


def _attention(rows: _Rows) -> dict[str, list[float]]:
    """[forward, backward] of each kernel at the longest sequence that has both."""
    shares: dict[str, list[float]] = {}
    for kernel, products in _BACKWARD_PRODUCTS.items():
        by_pass = {
            which: {
                row["tokens"]: row["share"]
                for row in rows
                if (row["kernel"], row["which"]) == (kernel, which)
            }
            for which in ("forward", "backward")
        }
        both = by_pass["forward"].keys() & by_pass["backward"].keys()
        if both:
            forward, backward = (by_pass[which][max(both)] for which in ("forward", "backward"))
            shares[kernel] = [forward, products * backward]
    return shares
