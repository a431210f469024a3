"""Small HLO programs, written for these tests."""

FORWARD = "jit(f)/jvp()/while/body/attention/shard_map/core_attention"
PERMUTE = f'source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}}}}, metadata={{op_name="{FORWARD}/ppermute"}}'
BACKEND = 'backend_config={"collective_backend_config":{"is_sync":false,"backend":"NVSHMEM","collectives_mode":"X"}}'
CUDNN = f'custom_call_target="__cudnn$fmhaSoftmax", metadata={{op_name="{FORWARD}/fwd"}}'
BLOCK = "bf16[1,64,2,16]{3,2,1,0}"
NO_MASK = 'backend_config={"cudnn_fmha_backend_config":{"mask_type":"NO_MASK"}}'

# A ring of four: the first permute of a round overlaps with an attention kernel, the second with
# nothing.
RING = f"""\
HloModule jit_f, is_scheduled=true, entry_computation_layout={{()->f32[]}}

FileNames
1 "ring.py"

%body (carry: (s32[], bf16[1,64,2,16])) -> (s32[], bf16[1,64,2,16]) {{
  %carry = (s32[], {BLOCK}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %block = {BLOCK} get-tuple-element(%carry), index=1
  %hop-start = ({BLOCK}, {BLOCK}) collective-permute-start(%block), {PERMUTE}, {BACKEND}
  %fmha = (bf16[1,2,64,16]{{3,2,1,0}}, f32[1,2,64]{{2,1,0}}) custom-call(%block, %block, %block), {CUDNN}, {NO_MASK}
  %hop-done = {BLOCK} collective-permute-done(%hop-start)
  %late-start = ({BLOCK}, {BLOCK}) collective-permute-start(%hop-done), {PERMUTE}
  %late-done = {BLOCK} collective-permute-done(%late-start)
  ROOT %next = (s32[], {BLOCK}) tuple(%i, /*index=1*/%late-done)
}}

%condition (carry.1: (s32[], bf16[1,64,2,16])) -> pred[] {{
  %carry.1 = (s32[], {BLOCK}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}}

ENTRY %main (block.1: bf16[1,64,2,16]) -> f32[] {{
  %block.1 = bf16[1,64,2,16]{{3,2,1,0:S(5)}} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], {BLOCK}) tuple(%zero, %block.1)
  %loop = (s32[], {BLOCK}) while(%start), condition=%condition, body=%body
  ROOT %result = f32[] constant(1)
}}
"""


def program(*lines: str, more: str = "") -> str:
    """A scheduled program whose entry has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, is_scheduled=true\n{more}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
