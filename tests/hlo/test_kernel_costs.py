import pytest

from jaxlc.hlo import analyze, parse
from jaxlc.hlo.kernel_costs import Product, kernel_cost
from tests.hlo.snippets import program

# One of 32 layers' weights is cast and multiplied; one of 32 results is written in place.
FUSIONS = """
%slice_and_cast (p0: f32[32,64,128], p1: s32[]) -> bf16[64,128] {
  %p0 = f32[32,64,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,64,128]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,128}
  %one = f32[64,128]{1,0} bitcast(%slice)
  ROOT %cast = bf16[64,128]{1,0} convert(%one)
}

%gemm (p2: bf16[256,64], p3: bf16[64,128]) -> bf16[256,128] {
  %p2 = bf16[256,64]{1,0} parameter(0)
  %p3 = bf16[64,128]{1,0} parameter(1)
  ROOT %dot = bf16[256,128]{1,0} dot(%p2, %p3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%put (p4: f32[32,64,128], p5: f32[64,128], p6: s32[]) -> f32[32,64,128] {
  %p4 = f32[32,64,128]{2,1,0} parameter(0)
  %p5 = f32[64,128]{1,0} parameter(1)
  %p6 = s32[] parameter(2)
  %nil = s32[] constant(0)
  %row = f32[1,64,128]{2,1,0} bitcast(%p5)
  ROOT %update = f32[32,64,128]{2,1,0} dynamic-update-slice(%p4, %row, %p6, %nil, %nil)
}

%both (p7: f32[1000]) -> (f32[1000], bf16[1000]) {
  %p7 = f32[1000]{0} parameter(0)
  %half = bf16[1000]{0} convert(%p7)
  %twice = f32[1000]{0} add(%p7, %p7)
  ROOT %pair = (f32[1000]{0}, bf16[1000]{0}) tuple(%twice, %half)
}
"""
INPUTS = (
    "%w = f32[32,64,128]{2,1,0} parameter(0)",
    "%i = s32[] parameter(1)",
    "%x = bf16[256,64]{1,0} parameter(2)",
    "%y = bf16[64,128]{1,0} parameter(3)",
    "%z = f32[64,128]{1,0} parameter(4)",
    "%u = f32[1000]{0} parameter(5)",
    "%q = f8e4m3fn[256,64]{1,0} parameter(6)",
)
CUBLAS = 'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
LAYER, X, Y = 64 * 128, 2 * 256 * 64, 2 * 64 * 128


@pytest.mark.parametrize("line, flops, dtype, num_bytes", [
    ("fusion(%w, %i), kind=kLoop, calls=%slice_and_cast", 0, "", 4 * LAYER + 4 + 2 * LAYER),
    ("fusion(%x, %y), kind=kCustom, calls=%gemm", 2 * 256 * 64 * 128, "bf16", X + Y + 2 * 256 * 128),
    ("fusion(%w, %z, %i), kind=kLoop, calls=%put", 0, "", 4 * LAYER + 4 + 4 * LAYER),
    # read once, though used twice
    ("fusion(%u), kind=kLoop, calls=%both", 0, "", 4000 + 4000 + 2000),
], ids=["slice", "gemm", "update in place", "two results"])  # fmt: skip
def test_kernel_cost_of_fusions(line, flops, dtype, num_bytes):
    shape = dict(
        slice_and_cast="bf16[64,128]{1,0}", gemm="bf16[256,128]{1,0}", put="f32[32,64,128]{2,1,0}"
    )
    name = line.rpartition("%")[2]
    cost = cost_of(f"%it = {shape.get(name, '(f32[1000]{0}, bf16[1000]{0})')} {line}")
    assert cost[:3] == (flops, dtype, num_bytes)
    assert cost.products == ((Product("bf16", 256, 128, 64),) if flops else ())


@pytest.mark.parametrize("line, flops, dtype, num_bytes", [
    ("bf16[256,128]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
     2 * 256 * 64 * 128, "bf16", X + Y + 2 * 256 * 128),
    ('(bf16[256,128]{1,0}, s8[100]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", ' + CUBLAS,
     2 * 256 * 64 * 128, "bf16", X + Y + 2 * 256 * 128 + 100),
    ('f32[256,128]{1,0} custom-call(%q, %y), custom_call_target="__cublas$lt$matmul$f8", ' + CUBLAS,
     2 * 256 * 64 * 128, "f8e4m3fn", 256 * 64 + Y + 4 * 256 * 128),
    ("f32[64,128]{1,0} copy(%z)", 0, "", 8 * LAYER),
    ("f32[1,64,128]{2,1,0} dynamic-slice(%w, %i, %i, %i)", 0, "", 8 * LAYER + 12),
], ids=["dot", "cublas", "cublas f8", "copy", "slice"])  # fmt: skip
def test_kernel_cost_of_single_instructions(line, flops, dtype, num_bytes):
    cost = cost_of(f"%it = {line}")
    assert cost[:3] == (flops, dtype, num_bytes)
    assert cost.products == ((Product(dtype, 256, 128, 64),) if flops else ())


def test_kernel_cost_of_batched_product_has_batch():
    dims = (
        "lhs_contracting_dims={2}, rhs_contracting_dims={2}, lhs_batch_dims={0}, rhs_batch_dims={0}"
    )
    cost = cost_of(f"%it = f32[32,64,64]{{2,1,0}} dot(%w, %w), {dims}")
    assert cost.products == (Product("f32", rows=64, columns=64, depth=128, batch=32),)
    assert cost.flops == 2 * 32 * 64 * 64 * 128


@pytest.mark.parametrize("line", [
    "s32[] constant(1)",
    "(s32[]) tuple(%i)",
    "f32[8192]{0} bitcast(%z)",
    'f32[8192]{0} custom-call(), custom_call_target="AllocateBuffer"',
])  # fmt: skip
def test_kernel_cost_of_renaming_is_none(line):
    assert cost_of(f"%it = {line}") is None


def cost_of(line: str):
    compiled = parse(program(*INPUTS, line, "ROOT %end = s32[] constant(0)", more=FUSIONS))
    return kernel_cost(compiled, compiled.entry, compiled.entry.instructions["it"])


HOST = """
%out (p0: f32[32,64], p1: f32[1,64], p2: s32[]) -> f32[32,64] {
  %p0 = f32[32,64]{1,0:S(5)} parameter(0)
  %p1 = f32[1,64]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %put = f32[32,64]{1,0:S(5)} dynamic-update-slice(%p0, %p1, %p2, %p2)
}
"""


def test_host_copies_in_both_directions():
    compiled = analyze(program(
        "%stack = f32[32,64]{1,0:S(5)} parameter(0)",
        "%x = f32[1,64]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%s = ((f32[32,64]{1,0:S(5)}, f32[1,64]{1,0}, s32[]), f32[32,64]{1,0:S(5)}, u32[])"
        " fusion-start(%stack, %x, %i), kind=kLoop, calls=%out",
        "%d = f32[32,64]{1,0:S(5)} fusion-done(%s)",
        "%bs = (f32[32,64]{1,0}, f32[32,64]{1,0:S(5)}, u32[]) copy-start(%d)",
        "%bd = f32[32,64]{1,0} copy-done(%bs)",
        "%same = f32[32,64]{1,0} copy(%bd)",
        "ROOT %row = f32[1,64]{1,0} dynamic-slice(%d, %i, %i), dynamic_slice_sizes={1,64}",
        more=HOST,
    ))  # fmt: skip
    copies = [(copy.start.name, copy.done.name, copy.bytes, copy.is_to_host)
              for copy in compiled.host_copies[compiled.entry.name]]  # fmt: skip
    assert copies == [("s", "d", 256, True), ("bs", "bd", 8192, False), ("row", "row", 256, False)]
