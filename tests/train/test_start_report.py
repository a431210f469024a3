import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxlc.attention.kernels import cudnn
from jaxlc.config import to_dict
from jaxlc.train.reports.run_report import corpus_lines, resume_lines, step_lines
from tests.step.synthetic import small_config, small_step

CORPUS = SimpleNamespace(
    train=SimpleNamespace(num_documents=1, num_tokens=1200, epoch_tokens=1200, num_sequences=40),
    heldout=SimpleNamespace(num_documents=3, num_tokens=150),
)


def resume(
    step: int, *, old_steps: int, corpus: str = "a1b2", traced: str = "", **optimizer
) -> list[str]:
    config = small_config(train=dict(steps=20), optimizer=optimizer, profile=dict(steps=traced))
    stored = to_dict(config)
    stored["train"]["steps"] = old_steps
    return resume_lines(config, Path("runs/x"), "a1b2", step, dict(corpus=corpus, config=stored))


def test_step_lines_name_mesh_kernel_and_batch():
    config = small_config(train=dict(gradient_accumulation_steps=2), mesh=dict(context=2))
    text = "\n".join(step_lines(small_step(config)))
    assert "data=1 x fsdp=1 x context=2 x tensor=1: 2 x cpu, 1 process\n" in text
    assert "global batch size 4 x 96 tokens in 2 gradient accumulation steps" in text
    assert "kernel blockwise" in text


def test_step_lines_name_model_rope_optimizer_and_precision():
    """Each with the settings that decide it; a LoRA run trains a part of the parameters."""
    config = small_config(
        model=dict(rope_scaling="yarn", rope_scaling_factor=4.0, rope_scaling_original_tokens=24),
        optimizer=dict(
            schedule="wsd", decay_steps=20, warmup_steps=5, learning_rate=1e-4, max_grad_norm=0.0
        ),
        precision=dict(compute="bf16"),
        lora=dict(rank=2),
    )
    model, rope, optimizer, precision, *_, saves = step_lines(small_step(config))
    counts = r"\d,\d{3} of \d{2},\d{3} parameters trained, adapters of rank 2 included"
    assert re.fullmatch(f"model      tiny with random weights, {counts}", model)
    assert rope == "rope       yarn, factor 4 from 24 tokens; theta 10,000"
    assert optimizer == (
        "optimizer  AdamW, learning rate 0.0001, wsd over 100 steps, the last 20 of decay, 5 of warm-up; weight decay"
        " 0.1"
    )
    assert precision == (
        "precision  bfloat16 computation; trained parameters and optimizer state float32; frozen matrices bf16"
    )
    assert saves == "saves      at the end; keeps the latest 2 (train.keep_checkpoints)"


@pytest.mark.parametrize(
    ("warmup_steps", "last_rate"), [(99, None), (100, "0.0001"), (200, "5e-05")]
)
def test_step_lines_warn_of_a_schedule_that_ends_in_its_warmup(warmup_steps, last_rate):
    config = small_config(optimizer=dict(warmup_steps=warmup_steps, learning_rate=1e-4))
    line = next(line for line in step_lines(small_step(config)) if line.startswith("optimizer"))
    warning = f"(warning: the schedule ends in it, at a learning rate of {last_rate})"
    assert warning in line if last_rate else "warning" not in line


def test_step_lines_name_cudnn_on_gpus_only(monkeypatch):
    assert "cudnn" not in "\n".join(step_lines(small_step(small_config())))
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    step = SimpleNamespace(
        config=small_config(),
        mesh=SimpleNamespace(devices=np.array([gpu]), shape=dict(context=1), size=1),
        compute_dtype="bfloat16",
        abstract_state=SimpleNamespace(params={}),
        frozen=frozenset(),
        model=object(),
        custom_optimizer=object(),
    )
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    for version, line in (((9, 18, 1), "cudnn      9.18.1"), ((), "cudnn      not found")):
        monkeypatch.setattr(cudnn, "cudnn_version", lambda version=version: version)
        assert line in step_lines(step)


@pytest.mark.parametrize(
    "steps, epochs", [(5, "5 steps, 0.5 epochs"), (1, "1 step, 0.1 epochs"), (10_000, "1,000")]
)
def test_corpus_lines_count_documents_tokens_and_epochs(steps, epochs):
    data, epoch = corpus_lines(small_config(), CORPUS, steps)
    assert "1 document, 1,200 tokens; held out: 3 documents, 150 tokens" in data
    assert "40 sequences, 10 steps; this run: " in epoch and epochs in epoch


def test_corpus_lines_name_the_epoch_of_a_mixture():
    train = SimpleNamespace(num_documents=3, num_tokens=1200, epoch_tokens=900, num_sequences=40)
    data, epoch = corpus_lines(
        small_config(), SimpleNamespace(train=train, heldout=CORPUS.heldout), 5
    )
    assert "3 documents, 1,200 tokens" in data
    assert epoch.startswith(
        "epoch      of the mixture, until a source would repeat: 40 sequences, 900 tokens, 10 steps;"
    )


def test_resume_lines_with_equal_config_are_one_line():
    assert resume(8, old_steps=20) == [
        "resuming from step 8 (latest valid checkpoint) of runs/x; use a different --workdir to start over"
    ]


def test_resume_lines_with_more_steps_name_new_end_of_schedule():
    _, line = resume(8, old_steps=12)
    assert line.startswith(
        "train.steps changed from 12 to 20: the cosine learning-rate schedule now ends at step 20"
    )
    assert len(resume(8, old_steps=12, schedule="constant")) == 1


def test_resume_lines_with_other_corpus_say_so():
    _, line = resume(8, old_steps=20, corpus="other")
    assert "training continues with different sequences" in line


@pytest.mark.parametrize(("traced", "is_done"), [("3:9", True), ("3:10", False), ("9:10", False)])
def test_resume_lines_name_traced_steps_that_are_done(traced, is_done):
    lines = resume(8, old_steps=20, traced=traced)
    assert (
        f"config.profile.steps={traced}: these steps are done, so this run traces none" in lines
    ) == is_done


def test_resume_lines_after_last_step_say_how_to_continue():
    assert resume(20, old_steps=20) == [
        "runs/x is already trained to step 20: continue with --config.train.steps=40,"
        " or use a different --workdir to start over"
    ]
