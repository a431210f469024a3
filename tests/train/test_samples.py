"""Texts that a run generates during training, early stopping, and runs without evaluation."""

import functools
import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.config import read_config
from jaxlc.core.errors import UserError
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.generation import generator
from jaxlc.generation.generator import CachedStep, Generator, abstract_params
from jaxlc.generation.sampling import Sampling
from jaxlc.models.contract import layout_for
from jaxlc.simulate.topology import make_mesh, topology
from jaxlc.step.state import bytes_per_device
from jaxlc.step.step import build_step
from jaxlc.train import Callback, stage
from jaxlc.train.loop import run
from jaxlc.train.reports.metrics import WandbWriter, read_rows
from tests.step.synthetic import lowered_decoding, small_config, small_step
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")

SAMPLES = dict(sample_every_steps=2, sample_prompts=("def ", "import"), sample_tokens=6)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = runs.write_config(tmp_path_factory.mktemp("samples"))

    def changed(**train):
        settings = read_config(str(path))
        settings.model.num_layers = 1
        settings.mesh.update(data=2, context=2, tensor=2)
        settings.optimizer.learning_rate = 0.05  # so that texts change
        settings.train.update(dict(steps=4, eval_every_steps=0, eval_sequences=0) | train)
        return settings

    return changed


@pytest.fixture(scope="module")
def plain(config, tmp_path_factory):
    """The losses of a run without samples."""
    workdir = tmp_path_factory.mktemp("plain")
    run(config(), workdir)
    return losses(workdir)


def losses(workdir):
    return [row["loss"] for row in runs.rows(workdir) if "loss" in row]


def texts(workdir, step):
    lines = (workdir / "samples" / f"{step}.jsonl").read_text().splitlines()
    return {row["prompt"]: row["text"] for row in map(json.loads, lines)}


def test_samples_are_those_of_the_checkpoint_and_change_no_loss(
    config, plain, tmp_path, capsys, monkeypatch
):
    copied = []
    monkeypatch.setattr(generator, "cast_params", lambda *params: copied.append(params))
    run(config(**SAMPLES), tmp_path)
    assert not copied
    monkeypatch.undo()
    assert losses(tmp_path) == plain
    output = capsys.readouterr().out
    assert "samples    2 texts" in output and "sample of step 2: def " in output
    options = dict(max_tokens=6, temperature=0.7, top_p=0.9)
    result = jaxlc.load(tmp_path, mesh={})  # the run has data=2 x context=2 x tensor=2
    generations = jaxlc.generate(result, ["def ", "import"], **options)
    assert list(texts(tmp_path, 4).values()) == [x.text for x in generations]
    assert texts(tmp_path, 2).keys() == texts(tmp_path, 4).keys()
    assert texts(tmp_path, 2) != texts(tmp_path, 4)
    assert any("def " in str(path.read_bytes()) for path in (tmp_path / "tensorboard").iterdir())


MODELS = dict(
    untied={},
    tied=dict(model=dict(tie_embeddings=True)),
    lora=dict(lora=dict(rank=2), precision=dict(compute="fp32", frozen="fp32")),
    nf4=dict(lora=dict(rank=2), precision=dict(compute="fp32", frozen="nf4")),
)
# Any two sizes of axes, and any size and model, occur together.
GRID = [
    ("untied", dict(data=2, fsdp=2, context=2)),
    ("untied", dict(tensor=2)),
    ("tied", dict(data=2, tensor=2)),
    ("tied", dict(fsdp=2, context=2)),
    ("lora", dict(fsdp=2, tensor=2, context=2)),
    ("lora", dict(data=2, context=2)),
    ("nf4", dict(context=2, tensor=2)),
    ("nf4", dict(data=2, fsdp=2)),
    ("untied", dict(context=8)),
]


def step_of(name, mesh, **model):
    sections = MODELS[name] | dict(mesh=mesh)
    sections["model"] = MODELS[name].get("model", {}) | dict(vocab_size=64) | model
    return small_step(small_config(**sections))


@pytest.fixture(scope="module")
def sampled():
    """The tokens that a sampler of a mesh generates."""

    @functools.cache
    def of(name, mesh):
        step = step_of(name, dict(mesh))
        params = step.init().params
        for path in params["layers"]["attention"].get("lora", {}).values():
            path["b"] = jax.device_put(
                np.float32(0.1) * np.ones(path["b"].shape), path["b"].sharding
            )
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, 64, length, dtype=np.int32) for length in (30, 7, 12)]
        sampler = Generator(step, params, ByteTokenizer(), copies=False)
        sampling = Sampling(temperature=0.7, top_p=0.9, seed=3)
        return [x.tokens.tolist() for x in sampler(prompts, max_tokens=16, sampling=sampling)]

    return of


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), GRID, ids=str)
def test_samples_of_a_mesh_are_those_of_one_device(name, mesh, sampled):
    assert sampled(name, tuple(mesh.items())) == sampled(name, ())


@pytest.mark.full
@pytest.mark.parametrize("name", ["untied", "tied", "lora"])
@pytest.mark.parametrize(("mesh", "share"), [({}, 0.1), (dict(context=2), 0.8)], ids=str)
def test_sampler_has_no_second_copy_of_the_weights_on_gpus(name, mesh, share):
    """The temporary arrays of the compiled program are smaller than a copy in bfloat16. With context, XLA transposes
    two of seven float32 matrices of all layers.
    """
    pytest.importorskip("jax_cuda12_plugin")
    sizes = dict(num_layers=32, model_dim=256, ffn_dim=512, head_dim=64, vocab_size=512)
    config = step_of(name, mesh, **sizes).config
    config = replace(config, precision=replace(config.precision, compute="bf16"))
    gpus = topology(f"h100:1x{config.mesh.num_devices}")
    step = build_step(config, make_mesh(gpus, config.mesh))
    dtype = step.compute_dtype
    cached = CachedStep(config=step.config, mesh=step.mesh, compute_dtype=dtype)
    params = step.abstract_state.params
    lowered = lowered_decoding(cached, params, layout_for(46, step.mesh))
    temporary = lowered.compile().memory_analysis().temp_size_in_bytes
    copy = abstract_params(step, params)
    assert temporary < share * bytes_per_device(copy)


def test_samples_fail_training_goes_on_without_evaluation(
    config, plain, tmp_path, monkeypatch, capsys
):
    def fail(*arguments, **options):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Generator, "__call__", fail)
    result = run(config(**SAMPLES), tmp_path)
    assert result.step == 4 and losses(tmp_path) == plain
    assert result.evaluation is None
    assert all("eval_loss" not in row for row in runs.rows(tmp_path))
    with pytest.raises(UserError, match="no held-out"):
        result.evaluate()
    assert not (tmp_path / "samples").exists()
    output = capsys.readouterr().out
    assert output.count("no samples from step 2 on (RuntimeError on process 0: no memory)") == 1


@pytest.mark.parametrize(
    ("train", "problem"),
    [
        (dict(sample_every_steps=4), "only together"),
        (dict(sample_prompts=("a",)), "only together"),
        (dict(sample_chat=True), "sample_chat=True has no effect without"),
        (dict(eval_sequences=0, early_stop_evals=2), "eval_sequences=0 has none"),
        (
            dict(eval_sequences=2, early_stop_evals=2),
            "no effect without config.train.eval_every_steps",
        ),
    ],
)
def test_settings_of_samples_without_effect_raise(config, train, problem):
    with pytest.raises(UserError, match=problem):
        jaxlc.config.load(config(**train))


class _Fails(Callback):
    """Ends a run at an evaluation with an error, as a kill would."""

    def __init__(self, step: int):
        self.step = step

    def on_evaluation(self, step, evaluation):
        if step == self.step:
            raise KeyError("killed")


def test_early_stop_ends_the_run_after_worse_evaluations(config, tmp_path, capsys, monkeypatch):
    """At the step of the evaluation, also after a kill between it and the checkpoint."""
    reads = []
    monkeypatch.setattr(stage, "read_rows", lambda path: reads.append(path) or read_rows(path))
    settings = config(early_stop_evals=2, eval_every_steps=2, eval_sequences=2)
    settings.train.update(steps=9, checkpoint_every_steps=0)
    settings.optimizer.learning_rate = 3.0  # the loss rises
    result = run(settings, tmp_path)
    found = [row["eval_loss"] for row in runs.rows(tmp_path) if "eval_loss" in row][1:]
    assert result.exit_status == 0 and result.step == 2 * len(found) < 9
    assert min(found) < min(found[-2:])
    assert len(reads) == 2 < len(found), "once in the run, and for its result: the file grows"
    again = run(settings, tmp_path)
    assert again.step == result.step and again.evaluation.loss == result.evaluation.loss
    assert "increase it, or set it to 0" in capsys.readouterr().out
    settings.train.checkpoint_every_steps = 2
    with pytest.raises(KeyError):
        run(settings, tmp_path / "killed", callbacks=[_Fails(result.step)])
    resumed = run(settings, tmp_path / "killed")
    assert (resumed.step, resumed.evaluation.loss) == (result.step, result.evaluation.loss)


def test_wandb_gets_a_table_of_texts(tmp_path, monkeypatch):
    from tests.train.test_wandb import Server

    server = Server()
    server.Table = lambda columns, data: (columns, data)
    monkeypatch.setitem(sys.modules, "wandb", server)
    writer = WandbWriter("project", "a1", tmp_path, {}, pytest.fail)
    writer.write(4, {"samples": {"def ": "f(x)"}})
    writer.close()
    assert server.rows == [(4, dict(samples=(["prompt", "text"], [["def ", "f(x)"]])))]


_FAILS_TO_WRITE = """
from jaxlc.train import stage

def fail(path, texts):
    raise OSError(28, "No space left on device")

stage.write_rollouts = fail
"""


@pytest.mark.full
def test_processes_agree_on_a_failure(tmp_path):
    """Only process 0 writes, and both end sampling."""
    path = runs.write_config(tmp_path)
    path.write_text(path.read_text() + _FAILS_TO_WRITE)
    options = {f"train__{name}": value for name, value in SAMPLES.items()}
    options["train__sample_prompts"] = "def"
    pair = runs.start_pair(path, tmp_path / "run", train__steps=4, **options)
    output, _ = (runs.finish(process) for process in pair)
    assert output.count("no samples from step 2 on (OSError on process 0: No space left") == 1
    assert len(losses(tmp_path / "run")) == 4
