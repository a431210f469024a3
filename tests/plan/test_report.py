"""The page and the summary of a plan: verdicts, advice, and estimates with two digits."""

import dataclasses

from jaxlc.plan.report import Change, page, summary
from tests.plan.sample_plan import PREDICTED, plan_of, with_temporaries
from tests.plan.test_memory import GIB, MEMORY


def test_page_without_advice_prints_the_command():
    text = page(plan_of(with_temporaries(80)), "python -m jaxlc.plan --config=x.py --advise")
    assert text.endswith(
        "To search for settings that fit: python -m jaxlc.plan --config=x.py --advise"
    )


def test_page_with_insufficient_changes_says_so():
    change = Change(
        overrides="--config.a=1", cost="", device_peak_bytes=0, host_bytes_per_node=0, fits=False
    )
    assert "none is enough" in page(plan_of(with_temporaries(80), advice=(change,)), "")
    enough = dataclasses.replace(change, fits=True)
    assert "none is enough" not in page(plan_of(with_temporaries(80), advice=(change, enough)), "")


def test_page_with_small_nvshmem_heap_prints_needed_size():
    text = page(plan_of(dataclasses.replace(MEMORY, symmetric_used_bytes=4 * GIB + 1)), "")
    assert f"--config.runtime.nvshmem_heap_bytes={5 * GIB}" in text
    assert "nvshmem_heap_bytes" not in page(plan_of(MEMORY), "")


def test_estimates_are_medians_with_interval_and_two_digits():
    """1 token/s at 2 s per step, which is the median: 0.5 at 4 s, 2 at 1 s."""
    plan = plan_of(MEMORY)
    text = page(plan, "")
    assert "about 2.0 s (1.0 to 4.0), bound by compute" in text
    assert "about 1.0 (0.50 to 2.0)" in text and "about 40% (20 to 80)" in text
    assert "500 ms, exposed (kernels wait): 100 ms" in text
    assert "no step on several GPUs was measured" in text
    assert summary(plan).startswith(
        "estimated: about 2.0 s (1.0 to 4.0) per step, 1.0 tokens/s per GPU"
    )
    slower = dataclasses.replace(
        plan, predicted=dataclasses.replace(PREDICTED, step_seconds_interval=(2.0, 8.0))
    )
    text = page(slower, "")
    assert "about 4.0 s (2.0 to 8.0)" in text and "1.0 s, exposed (kernels wait): 200 ms" in text
    html = dataclasses.replace(slower, mesh=dict(context=4))._repr_html_()
    assert html.count("about 4.0 s (2.0 to 8.0)") == 3  # summary, figure of links, text
    assert "attention 95%, waiting 5.0%" in text


def test_page_names_model_warning_and_unused_transport():
    config = dict(model=dict(preset="tiny", init_from="../models/qwen14"))
    plan = plan_of(MEMORY, config=config, context_warning="config.data.seq_len=8 is longer ...")
    plan = dataclasses.replace(plan, mesh=dict(context=4))
    text, html = page(plan, ""), plan._repr_html_()
    assert (
        plan.title.startswith("qwen14, 1 tokens on h100:1x4")
        and "\nqwen14, sequence length 1, " in text
    )
    assert (
        "WARNING: config.data.seq_len=8 is longer ..." in text
        and "WARNING: config.data.seq_len=8" in html
    )
    assert "unused, since attention has no collective permutes" in text
    with_hops = dataclasses.replace(
        plan, context_warning="", ring=dataclasses.replace(plan.ring, hops=2)
    )
    assert "unused" not in page(with_hops, "") and "WARNING" not in page(with_hops, "")
