from jaxlc.hlo import parse
from tests.hlo.liveness import max_alive
from tests.hlo.snippets import RING, program


def alive(text: str, dims=(4,)) -> int:
    return max_alive(parse(text), lambda array: array.dims == dims)


def test_max_alive_counts_until_last_use():
    assert alive(program(
        "%a = f32[4]{0} constant({...})",
        "%b = f32[4]{0} negate(%a)",
        "%c = f32[4]{0} negate(%b)",
        "ROOT %d = f32[4]{0} negate(%c)",
    )) == 2  # fmt: skip
    assert alive(program(
        "%a = f32[4]{0} constant({...})",
        "%b = f32[4]{0} negate(%a)",
        "%c = f32[4]{0} negate(%b)",
        "ROOT %d = f32[4]{0} add(%c, %a)",
    )) == 3  # fmt: skip


def test_max_alive_ignores_renamed_arrays():
    assert alive(program(
        "%a = f32[4]{0} constant({...})",
        "%t = (f32[4]{0}, f32[2]{0}) tuple(%a, %a)",
        "%g = f32[4]{0} get-tuple-element(%t), index=0",
        "%b = f32[4]{0} bitcast(%g)",
        "ROOT %c = f32[2]{0} slice(%b), slice={[0:2]}",
    )) == 1  # fmt: skip


def test_max_alive_of_loop_adds_to_its_carry():
    """The ring holds the block that it sends and the one that it receives; a later use keeps the
    first one alive.
    """
    assert alive(RING, (1, 64, 2, 16)) == 2
    held = RING.replace(
        "ROOT %result = f32[] constant(1)", "ROOT %result = f32[] custom-call(%block.1, %kept)"
    )
    held = held.replace("  %loop =", "  %kept = bf16[1,64,2,16]{3,2,1,0} copy(%block.1)\n  %loop =")
    assert alive(held, (1, 64, 2, 16)) == 3
