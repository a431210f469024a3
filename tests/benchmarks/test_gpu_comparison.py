"""The comparison of steps with PyTorch: classes of kernels, failing processes, and the page."""

import json
import sys
import time

import pytest

from benchmarks import gpu_comparison
from benchmarks.gpu_comparison import Call, class_of, loss_difference, page, summary
from jaxlc.profile.trace_events import ATTENTION, MATMUL, OTHER

KERNELS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128": ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::Coll": ATTENTION,
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT": MATMUL,
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm": MATMUL,
    "triton_tem_fused__grouped_mm_3": MATMUL,
    "aten::mm": MATMUL,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "triton_red_fused__scaled_dot_product_cudnn_attention_backward_mm_rms_norm_2": OTHER,
    "triton_poi_fused_mm_silu_1": OTHER,
    "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": OTHER,
    "Memcpy DtoD (Device -> Device)": OTHER,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_class_of_kernel_is_that_of_its_work(kernel):
    assert class_of(kernel) == KERNELS[kernel]


def _line(column: str, seconds: float, losses: list[float], **others) -> dict:
    kernels = {"nvjet_sm90": (0.5 * seconds, 3.0), "sdpa_sm90_flash_fprop": (0.25 * seconds, 1.0)}
    result = dict(step_seconds=[seconds, 9 * seconds, seconds], losses=losses, kernels=kernels)
    result |= dict(peak_bytes=36_500_000_000, versions=dict(torch="2.11"), device="H100")
    job = dict(
        row="8b", column=column, tokens=32_768, settings=[], dry_run=False, call="2026-11-30 10"
    )
    return job | summary(result) | others


def test_page_has_classes_ratios_and_reasons():
    fa3 = dict(row="8b", column="fa3_op", tokens=32_768, settings=[], dry_run=False)
    fa3 |= dict(call="2026-11-29 10", skipped="FlashAttention-3: no module")
    lines = [
        _line("jaxlc", 9.0, [1.0]),  # of an earlier call
        _line("jaxlc", 0.8, [2.0, 1.0]),
        _line("cudnn_op", 0.88, [2.002, 1.0]),
        _line("cudnn_attention", 0.9, [2.0, 1.0]),
        fa3,
    ]
    text = page(lines)
    assert "2026-11-29 to 2026-11-30. torch 2.11." in text and "one H100" in text
    row = "| PyTorch, cuDNN, op | 0.880 | 0.220 | 0.440 | 0.220 | 37,236 | 36.5 | 2.0020 |"
    assert row in text
    assert (
        "jaxlc is 1.100 times as fast as PyTorch, cuDNN, op; the first losses differ by 1.0e-03"
        in text
    )
    assert "PyTorch, FlashAttention-3, op, skipped: FlashAttention-3: no module" in text
    assert "of 2 calls" in text


def test_loss_difference_counts_the_first_steps_only():
    assert loss_difference([2.0, 3.0, 9.0], [2.0, 2.0, 1.0], 2) == 0.5


def test_processes_that_fail_or_take_too_long_become_results(tmp_path):
    job = dict(row="8b", column="cudnn_op", tokens=8, repeats=1, settings=[], dry_run=False)
    scripts = {"fails": "echo no torch >&2; exit 3", "hangs": "sleep 60"}
    for (name, text), seconds in zip(scripts.items(), (60.0, 0.5)):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
        call = Call(
            out=tmp_path / "rows.jsonl", python=str(script), column_seconds=seconds,
            deadline_seconds=time.monotonic() + 100,
        )  # fmt: skip
        call.run([job, job], is_torch=True)
    errors = [json.loads(x)["error"] for x in call.out.read_text().splitlines()]
    assert errors == ["status 3: no torch\n"] * 2 + ["did not finish in 0 s"] * 2
    assert "did not finish" in call.out.with_suffix(".md").read_text()


def test_unknown_row_is_an_error_with_the_names(monkeypatch, tmp_path):
    values = gpu_comparison.flags.FlagValues()
    gpu_comparison.define_flags(values)
    values(["gpu_comparison", "--rows=7b", f"--out={tmp_path / 'x.jsonl'}"])
    monkeypatch.setattr(gpu_comparison.flags, "FLAGS", values)
    with pytest.raises(SystemExit, match="'7b': expected some of 8b, 1b"):
        gpu_comparison.main(sys.argv)
