"""Which masks, meshes, head counts and dtypes each attention strategy and kernel supports.

tests/attention runs the cases of this table. `make reference` writes it to docs/support.md.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jaxlc.attention.contract import AttentionProblem
from jaxlc.attention.kernels import fa3
from jaxlc.attention.kernels.choose import KERNELS
from jaxlc.attention.strategies.sharded_attention import STRATEGIES
from jaxlc.config import defaults, load
from jaxlc.core.errors import UserError

MASKS = {  # name: (packed, causal, window)
    "full": (False, False, None),
    "full, packed documents": (True, False, None),
    "causal": (False, True, None),
    "causal, packed documents": (True, True, None),
    "window of 1 token": (True, True, 1),
    "window within a chunk": (False, True, 5),
    "window over chunks, packed documents": (True, True, 40),
    "window longer than the sequence": (False, True, 1000),
}
HEADS = {  # name: (query heads, key/value heads)
    "as many key/value heads as queries": (24, 24),
    "grouped queries": (24, 6),
    "2 key/value heads": (24, 2),
    "6 heads": (6, 6),  # do not split over 4 or 8 ranks
}
OTHER_AXES = {"none": {}, "tensor": dict(tensor=2), "fsdp": dict(fsdp=2), "data": dict(data=2)}
CONTEXTS = (1, 2, 3, 4, 6, 8)
DTYPES = ("float32", "bfloat16")
MAX_DEVICES = 8


class Case(NamedTuple):
    """One case of the test suite; mask, heads and other_axis are keys of the tables above."""

    strategy: str
    kernel: str
    mask: str
    context: int
    heads: str
    other_axis: str  # split by 2, in addition to context
    dtype: str

    @property
    def axes(self) -> dict[str, int]:
        return dict(context=self.context) | OTHER_AXES[self.other_axis]

    @property
    def ulysses_degree(self) -> int | None:
        """The inner ranks of hybrid: the ring has 2 or 3 groups, or 1 where the context size is
        prime.
        """
        return (
            {1: 1, 2: 2, 3: 3, 4: 2, 6: 2, 8: 4}[self.context]
            if self.strategy == "hybrid"
            else None
        )

    @property
    def limit(self) -> str | None:
        """The message of the NotImplementedError that this case must raise. None: it is supported."""
        ranks = {"ulysses": self.context, "hybrid": self.ulysses_degree}.get(self.strategy, 1)
        heads, kv_heads = (
            count // OTHER_AXES[self.other_axis].get("tensor", 1) for count in HEADS[self.heads]
        )
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            return (
                f"unsupported: {heads} query and {kv_heads} key/value heads per rank do not"
                f" split over {ranks} ulysses"
            )
        return None


def cpu_kernels() -> list[str]:
    """The kernels that run on a CPU."""
    problem = AttentionProblem(
        platform="cpu",
        compute_capability=None,
        dtype="float32",
        head_dim=16,
        value_dim=16,
        window=None,
        implicit_positions=False,
    )
    return [name for name, kernel in KERNELS.items() if kernel.unsupported(problem) is None]


def covering() -> list[Case]:
    """Cases that contain every pair of values of two columns, and the ring on every context with
    every mask.
    """
    columns = (
        list(STRATEGIES),
        cpu_kernels(),
        list(MASKS),
        CONTEXTS,
        list(HEADS),
        list(OTHER_AXES),
        DTYPES,
    )
    cases = [case for case in map(Case._make, itertools.product(*columns)) if _fits(case)]
    supported = [case for case in cases if case.limit is None]
    chosen = [
        Case("ring", "blockwise", mask, context, "2 key/value heads", "none", "float32")
        for mask, context in itertools.product(MASKS, CONTEXTS)
    ]
    missing = set().union(*map(_pairs, supported)) - set().union(*map(_pairs, chosen))
    pairs = {case: frozenset(_pairs(case)) for case in supported}
    while missing:  # greedy: add the case with the most missing pairs
        best = max(supported, key=lambda case: len(missing & pairs[case]))
        chosen.append(best)
        missing -= pairs[best]
    limited = {
        (case.strategy, case.heads, case.context): case for case in cases if case.limit is not None
    }
    return chosen + list(limited.values())


def _fits(case: Case) -> bool:
    devices = case.context * (1 if case.other_axis == "none" else 2)
    return devices <= MAX_DEVICES


def _pairs(case: Case) -> Iterator[tuple]:
    return itertools.combinations(enumerate(case), 2)


def tables() -> str:
    """The tables of docs/support.md."""
    lines = [
        "## Strategies",
        "",
        *_table("", list(STRATEGIES), _strategy_rows(covering())),
        "",
        "`ulysses` splits heads over the context ranks, `hybrid` over its inner ranks. Their number must divide the",
        "query heads of a tensor rank. It must divide the key/value heads, too, or be a multiple of them; then they",
        "are repeated.",
        "",
        "## Kernels",
        "",
        "For an H100 (compute capability 9.0) unless the row says otherwise. `auto` selects the first supported",
        "kernel from left to right, but never `mosaic`. The tests have no GPU: they check the operands of `fa3`,",
        "`cudnn` and `mosaic`, not their results (`tests/attention/test_fa3.py`, `test_cudnn.py`,",
        "`test_cudnn_packed.py`, `test_mosaic.py`). Before a run trains with calls of `cudnn` for packed",
        "documents, with `fa3`, or with `pallas` and head dims above 128, it compares them with the reference on",
        "its GPU, prints the error, and stops if it is above 1%. The message then names the kernel to select:",
        "`pallas` instead of `cudnn`, `cudnn` instead of `fa3`, `blockwise` instead of `pallas`.",
        "",
        *_table("", list(KERNELS), _joined(_kernel_rows())),
        "",
        "The kernel of `auto`, by compute capability. On Hopper it depends on the JAX version: `fa3` needs 0.11.2",
        "or later and its extra.",
        "",
        *_table("", list(_AUTO_COLUMNS), _joined(_auto_rows())),
        "",
        "`fa3` is FlashAttention-3, from the package dew-flash-attn: `pip install -e '.[fa3-cuda12]'` or",
        "`fa3-cuda13`, Python 3.12 and JAX 0.11.2 or later. The last JAX with NVSHMEM is 0.10.1, so a run has one",
        "of both. Direct calls were 1.15 to 1.22 times as fast as cuDNN in the forward and 1.17 to 1.35 times in",
        "the backward (one H100, causal, head dims 64, 128 and 256,",
        "[measured](../benchmarks/2026-11-26-h100.md#flashattention-3)); packed calls are not measured. A package",
        "of another version is refused; `pip install --no-deps -r requirements-fa3-cuda12.lock` checks the hash of",
        "its wheel. Plans need the package, too; a run prints the kernel that it selects and",
        "why. It is not deterministic: with `runtime.deterministic`, `auto` selects `cudnn`.",
        "",
        "The backward allocates float32 sums of dq, and with grouped queries of dk and dv, while it runs: plans",
        "count them as kernel workspaces, without the fragmentation that they cause. XLA puts no call of `fa3` in",
        "a CUDA graph ([launches](../benchmarks/2026-11-29-fa3-plans.md#launches)). A packed call takes the two",
        "longest documents, or three and then twelve in the order of per-document sharding; a ring step has no",
        "others, an own block a loop for them, as with `cudnn`. The scratch of the backward grows by 128 rows for",
        "each of three segments a document: by 5,000 rows, and in the loop by at most 3/8 of the rows of the",
        "queries, since the smallest size of its calls is for documents of 2,048 tokens.",
        "",
        "`mosaic` is tokamax's attention (Pallas on Mosaic GPU). It needs Python 3.12, JAX 0.11.1 and `pip install -e",
        "'.[mosaic]'`. Its backward for head dims above 192 does not fit into the shared memory of Blackwell, and",
        "a process can compile it ahead of time for one GPU generation only. Its forward skips fully masked blocks of",
        "128 keys, its backward pairs of blocks of 2,048 tokens.",
        "",
        "The Triton backend of Pallas, which `pallas` uses, is deprecated in JAX 0.11. Without it, `blockwise` serves",
        "packed documents on GPUs before Hopper.",
        "",
        "## Layer tiles",
        "",
        "With `memory.tile_tokens`, causal, on 8 context ranks, in `hybrid` with 4 inner ranks. *No* is a config",
        "error before JAX starts (`jaxlc/config/checks/mesh_checks.py`).",
        "",
        *_table("", list(STRATEGIES), _joined(_tile_rows())),
        "",
        "Layer tiles need `memory.remat` `full` or `attention`. They can save or offload only `residual`,",
        "`attention_out` and `attention_lse`. They are incompatible with `precision.fp8_scaling=delayed`.",
    ]
    return "\n".join(lines) + "\n"


def _joined(rows: Iterator[tuple[str, list[str]]]) -> Iterator[tuple[str, list[str]]]:
    """Rows with equal cells as one row, in the order of their first ones."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, cells in rows:
        names.setdefault(tuple(cells), []).append(name)
    yield from (("; ".join(joined), list(cells)) for cells, joined in names.items())


def _strategy_rows(cases: list[Case]) -> Iterator[tuple[str, list[str]]]:
    for column, values in ((2, MASKS), (3, CONTEXTS), (4, HEADS), (5, OTHER_AXES), (6, DTYPES)):
        yield from _joined(_rows_of_column(cases, column, values))


def _rows_of_column(
    cases: list[Case], column: int, values: Iterable
) -> Iterator[tuple[str, list[str]]]:
    for value in values:
        cells = []
        for strategy in STRATEGIES:
            limits = [
                case.limit for case in cases if case.strategy == strategy and case[column] == value
            ]
            # The limits depend on the numbers of heads and of ranks only.
            is_unlimited = not any(limits) or column not in (3, 4)
            cells.append("no" if all(limits) else "yes" if is_unlimited else "if the heads split")
        prefix = {3: "context ", 5: "other split axis: "}.get(column, "")
        yield f"{prefix}{value}", cells


_PROBLEM = dict(
    platform="gpu",
    compute_capability="9.0",
    dtype="bfloat16",
    head_dim=128,
    value_dim=128,
    window=None,
    implicit_positions=True,
)


def _kernel_rows() -> Iterator[tuple[str, list[str]]]:
    rows = {
        "causal or full": {},
        "packed documents": dict(implicit_positions=False, document_ranges=True),
        "sliding window": dict(window=4096),
        "sliding window in a ring": dict(window=4096, implicit_positions=False, window_ranges=True),
        "head dim 64": dict(head_dim=64, value_dim=64),
        "head dim 96": dict(head_dim=96, value_dim=96),
        "head dim 256": dict(head_dim=256, value_dim=256),
        "head dim 64 of values, 128 of queries": dict(value_dim=64),
        "head dim 576": dict(head_dim=576, value_dim=576),
        "float16": dict(dtype="float16"),
        "float32": dict(dtype="float32"),
        "on A100": dict(compute_capability="8.0"),
        "packed documents on A100": dict(
            compute_capability="8.0", implicit_positions=False, document_ranges=True
        ),
        "packed documents, cuDNN 9.17": dict(
            cudnn_version=(9, 17, 0), implicit_positions=False, document_ranges=True
        ),
        "packed documents on B200": dict(
            compute_capability="10.0", implicit_positions=False, document_ranges=True
        ),
        "head dim 256 on B200": dict(compute_capability="10.0", head_dim=256, value_dim=256),
        "on CPU": dict(platform="cpu", compute_capability=None),
    }
    for name, change in rows.items():
        problem = AttentionProblem(**_PROBLEM | change)
        limits = (getattr(x, "limit", x.unsupported)(problem) for x in KERNELS.values())
        yield name, [limit or "yes" for limit in limits]


_AUTO_COLUMNS = {  # (compute capability, whether fa3 is there)
    "8.x": ("8.0", False),
    "9.0, JAX 0.10.1": ("9.0", False),
    "9.0, JAX 0.11.2 or 0.12, fa3": ("9.0", True),
    "10.0": ("10.0", False),
    "12.0": ("12.0", False),
}


def _auto_rows() -> Iterator[tuple[str, list[str]]]:
    ranges = dict(implicit_positions=False)
    packed = ranges | dict(document_ranges=True)
    rows = {
        "causal or full; sliding window of `ulysses`": {},
        "packed documents; shared prefixes": packed,
        "packed documents with 2^31 elements": packed | dict(num_elements=2**31),
        "sliding window of one document in a ring; packed documents with a window on one rank or in `ulysses`": ranges
        | dict(window=4096, window_ranges=True),
        "packed documents with a window in a ring; shared prefixes with a window; `all_gather`; decoding": ranges,
        "head dims above 128, up to 256": dict(head_dim=256, value_dim=256),
    }
    for name, change in rows.items():
        cells = []
        for capability, with_fa3 in _AUTO_COLUMNS.values():
            problem = AttentionProblem(**_PROBLEM | dict(compute_capability=capability) | change)
            cells.append(f"`{_auto(problem, with_fa3)}`")
        yield name, cells


def _auto(problem: AttentionProblem, with_fa3: bool) -> str:
    if with_fa3 and fa3.limit(problem) is None:
        return "fa3"
    names = ("cudnn", "pallas", "blockwise")
    return next(name for name in names if KERNELS[name].unsupported(problem) is None)


def _tile_rows() -> Iterator[tuple[str, list[str]]]:
    rows = {
        "packed documents": {},
        "one document per sequence": dict(attention=dict(document_mask=False)),
        "sliding window": dict(model=dict(layer_kinds="sliding", attention=dict(window=100))),
        "fewer key/value heads than ulysses ranks": dict(
            model=dict(attention=dict(num_kv_heads=2))
        ),
        "fewer key/value heads than tensor ranks": dict(
            model=dict(attention=dict(num_kv_heads=1)), mesh=dict(tensor=2)
        ),
    }
    for name, change in rows.items():
        yield (
            name,
            ["yes" if _supports_tiles(strategy, change) else "no" for strategy in STRATEGIES],
        )


def _supports_tiles(strategy: str, change: dict[str, dict]) -> bool:
    config = defaults()
    config.model.attention.update(num_heads=16, num_kv_heads=8)
    config.mesh.context = 8
    config.attention.update(strategy=strategy, ulysses_degree=4 if strategy == "hybrid" else 1)
    config.memory.tile_tokens = 128
    for section, values in change.items():
        config[section].update(values)
    try:
        load(config)
    except UserError:
        return False
    return True


def _table(corner: str, names: list[str], rows: Iterator[tuple[str, list[str]]]) -> Iterator[str]:
    yield f"| {corner} | {' | '.join(f'`{name}`' for name in names)} |"
    yield "| --- " * (len(names) + 1) + "|"
    for name, cells in rows:
        yield f"| {name} | {' | '.join(cells)} |"
