"""What each strategy does and does not do: the table of the shared suite, from which docs/support.md is made.

python -m tests.attention.support > docs/support.md
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxlc.attention.api import STRATEGIES
from jaxlc.attention.choose import KERNELS
from jaxlc.attention.contract import AttentionProblem
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
    "window longer than the row": (False, True, 1000),
}
HEADS = {  # name: (query heads, key/value heads)
    "as many key/value heads as queries": (24, 24),
    "grouped queries": (24, 6),
    "2 key/value heads": (24, 2),
    "6 heads": (6, 6),  # which 4 or 8 ranks cannot split
}
BESIDE = {"none": {}, "tensor": dict(tensor=2), "fsdp": dict(fsdp=2), "data": dict(data=2)}
CONTEXTS = (1, 2, 3, 4, 6, 8)
DTYPES = ("float32", "bfloat16")
MAX_DEVICES = 8


class Case(NamedTuple):
    """One point of the suite; the words are keys of the tables above."""

    strategy: str
    kernel: str
    mask: str
    context: int
    heads: str
    beside: str
    dtype: str

    @property
    def axes(self) -> dict[str, int]:
        return dict(context=self.context) | BESIDE[self.beside]

    @property
    def ulysses_degree(self) -> int | None:
        """How hybrid cuts the context: a ring of 2 or 3 where it can, of one where the size is a prime."""
        return {1: 1, 2: 2, 3: 3, 4: 2, 6: 2, 8: 4}[self.context] if self.strategy == "hybrid" else None

    @property
    def limit(self) -> str | None:
        """The words of the NotImplementedError that this case must raise."""
        ranks = {"ulysses": self.context, "hybrid": self.ulysses_degree}.get(self.strategy, 1)
        heads, kv_heads = (count // BESIDE[self.beside].get("tensor", 1) for count in HEADS[self.heads])
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
            return f"ulysses splits heads over {ranks} ranks, and each of them has {heads} query and {kv_heads} key"
        return None


def kernels_here() -> list[str]:
    """Those that run on CPU."""
    case = AttentionProblem(
        platform="cpu",
        compute_capability=None,
        dtype="float32",
        head_dim=16,
        value_dim=16,
        window=None,
        implicit_positions=False,
    )
    return [name for name, kernel in KERNELS.items() if kernel.unsupported(case) is None]


def covering() -> list[Case]:
    """Cases that hold every pair of values of two columns, and the ring on every context with every mask."""
    columns = (list(STRATEGIES), kernels_here(), list(MASKS), CONTEXTS, list(HEADS), list(BESIDE), DTYPES)
    cases = [case for case in map(Case._make, itertools.product(*columns)) if _fits(case)]
    able = [case for case in cases if case.limit is None]
    chosen = [
        Case("ring", "blockwise", mask, context, "2 key/value heads", "none", "float32")
        for mask, context in itertools.product(MASKS, CONTEXTS)
    ]
    missing = set().union(*map(_pairs, able)) - set().union(*map(_pairs, chosen))
    pairs = {case: frozenset(_pairs(case)) for case in able}
    while missing:  # greedy: the case with the most pairs that are still missing
        best = max(able, key=lambda case: len(missing & pairs[case]))
        chosen.append(best)
        missing -= pairs[best]
    limited = {(case.strategy, case.heads, case.context): case for case in cases if case.limit is not None}
    return chosen + list(limited.values())


def _fits(case: Case) -> bool:
    devices = case.context * (1 if case.beside == "none" else 2)
    return devices <= MAX_DEVICES


def _pairs(case: Case) -> Iterator[tuple]:
    return itertools.combinations(enumerate(case), 2)


def matrix() -> str:
    """docs/support.md."""
    lines = [
        "# What each attention strategy and kernel does",
        "",
        "Made from the table that the tests run (`python -m tests.attention.support > docs/support.md`), so it cannot",
        "lie: a *yes* is a set of cases that match the float32 oracle, forward and gradient, and what a strategy or a",
        "named kernel cannot do is a `NotImplementedError` with these words.",
        "",
        "## Strategies",
        "",
        *_table("", list(STRATEGIES), _strategy_rows(covering())),
        "",
        "`ulysses` and the inner ranks of `hybrid` split heads: their number must divide the query heads of a tensor",
        "rank, and divide or be a multiple of its key/value heads (which are repeated where there are fewer).",
        "",
        "## Kernels",
        "",
        "On an H100 (compute capability 9.0). `auto` takes the first that can, from left to right. `cudnn` needs a GPU",
        "and the tests have none: what reaches it is tested (`tests/attention/test_cudnn.py`), what it answers is not.",
        "",
        *_table("", list(KERNELS), _kernel_rows()),
        "",
        "## Layers in tiles",
        "",
        "With `memory.tile_tokens`, on 8 ranks of context, of which 4 exchange heads in `hybrid`. Attention is causal,",
        "and kernels do what the table above says. *No* is an error before JAX starts (`jaxlc/config/tile_checks.py`).",
        "",
        *_table("", list(STRATEGIES), _tile_rows()),
        "",
        "They need `memory.remat` `full` or `attention`, can keep or offload no more than `residual` and attention's",
        "out and lse, and do not go with `precision.fp8_scaling=delayed`.",
    ]
    return "\n".join(lines) + "\n"


def _strategy_rows(cases: list[Case]) -> Iterator[tuple[str, list[str]]]:
    for column, values in ((2, MASKS), (3, CONTEXTS), (4, HEADS), (5, BESIDE), (6, DTYPES)):
        for value in values:
            cells = []
            for strategy in STRATEGIES:
                limits = [case.limit for case in cases if case.strategy == strategy and case[column] == value]
                does_all = not any(limits) or column not in (3, 4)  # the limit is of heads on ranks, of nothing else
                cells.append("no" if all(limits) else "yes" if does_all else "where the heads split")
            prefix = {3: "context ", 5: "axis beside: "}.get(column, "")
            yield f"{prefix}{value}", cells


def _kernel_rows() -> Iterator[tuple[str, list[str]]]:
    plain = dict(
        platform="gpu",
        compute_capability="9.0",
        dtype="bfloat16",
        head_dim=128,
        value_dim=128,
        window=None,
        implicit_positions=True,
    )
    rows = {
        "causal or full": {},
        "packed documents": dict(implicit_positions=False),
        "sliding window": dict(window=4096),
        "sliding window in a ring": dict(window=4096, implicit_positions=False),
        "head dim 64": dict(head_dim=64, value_dim=64),
        "head dim 96": dict(head_dim=96, value_dim=96),
        "head dim 256": dict(head_dim=256, value_dim=256),
        "values of another head dim": dict(value_dim=64),
        "float16": dict(dtype="float16"),
        "float32": dict(dtype="float32"),
        "on A100": dict(compute_capability="8.0"),
        "on CPU": dict(platform="cpu", compute_capability=None),
    }
    for name, change in rows.items():
        case = AttentionProblem(**{**plain, **change})
        yield name, [kernel.unsupported(case) or "yes" for kernel in KERNELS.values()]


def _tile_rows() -> Iterator[tuple[str, list[str]]]:
    rows = {
        "packed documents": {},
        "one document a row": dict(attention=dict(document_mask=False)),
        "sliding window": dict(attention=dict(window=100)),
        "fewer key/value heads than ranks that exchange": dict(model=dict(num_kv_heads=2)),
        "fewer key/value heads than tensor ranks": dict(model=dict(num_kv_heads=1), mesh=dict(tensor=2)),
    }
    for name, change in rows.items():
        yield name, ["yes" if _takes_tiles(strategy, change) else "no" for strategy in STRATEGIES]


def _takes_tiles(strategy: str, change: dict[str, dict]) -> bool:
    config = defaults()
    config.model.update(num_heads=16, num_kv_heads=8)
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


if __name__ == "__main__":
    print(matrix(), end="")
