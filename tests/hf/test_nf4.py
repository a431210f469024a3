"""Weights in NF4: files of bitsandbytes, and quantization with all of its bits.

Needs JAXLC_TRANSFORMERS_PYTHON, as tests/hf/test_transformers.py.
"""

import json

import jax
import numpy as np
import pytest

import jaxlc
from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.core.errors import UserError
from jaxlc.hf.load import paths_of
from jaxlc.models.quantized import is_quantized
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.language_model import LanguageModel
from jaxlc.step.step import build_step
from tests.hf.comparison import config_of, needs_transformers, relative_error, run_jobs, tokens_of
from tests.hf.models import SMALL, write_tokenizer
from tests.hf.test_export import tensors_in

pytestmark = needs_transformers
SIZES = dict(hidden_size=128, intermediate_size=320, head_dim=64, num_hidden_layers=2)
CONFIG = SMALL | SIZES | dict(model_type="llama", initializer_range=0.3)
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories in bf16 and in NF4, and what transformers computes."""
    root = tmp_path_factory.mktemp("nf4")
    directories = root / "bf16", root / "nf4"
    job = dict(job="nf4", directory=str(directories[0]), quantized=str(directories[1]))
    job |= dict(config=CONFIG, tokens=tokens_of(NUM_TOKENS).tolist())
    return *directories, run_jobs(root, {"nf4": job})["nf4"]


def step_of(directory, frozen="nf4", mesh=()):
    settings = config_of(directory, NUM_TOKENS, dict(mesh))
    settings.precision.frozen, settings.lora = frozen, dict(rank=2)
    config = load(settings)
    return build_step(config, make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices]))


def params_of(directory, **options):
    params, line = load_pretrained(step_of(directory, **options))
    return dict(paths_of(params)), line


def test_quantized_weights_equal_those_of_bitsandbytes(saved):
    in_bf16, in_nf4, reference = saved
    # shards of inputs are parts of blocks
    ours, line = params_of(in_bf16, mesh=dict(fsdp=2, context=2, tensor=2))
    theirs, their_line = params_of(in_nf4, mesh=dict(context=2, tensor=2))
    assert "quantized to NF4" in line and "quantized to NF4" not in their_line
    quantized = [path for path, x in ours.items() if is_quantized(x)]
    assert len(quantized) == 7
    for path in quantized:
        a, b = jax.device_get((ours[path], theirs[path]))
        codes, scales, maxima, offset = a.arrays
        np.testing.assert_array_equal(codes, b.codes)
        *_, their_maxima, their_offset = b.arrays
        assert (np.abs(offset - their_offset) <= np.spacing(their_offset)).all()
        same = offset == their_offset
        np.testing.assert_array_equal(scales[same], b.scales[same])
        np.testing.assert_array_equal(maxima[same], their_maxima[same])
        assert same.any()
    for layer in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        down = np.asarray(theirs["layers/mlp/w_down"].dequantized()[layer], np.float32).T
        np.testing.assert_array_equal(down, reference[name])


@pytest.mark.parametrize("frozen", ["nf4", "bf16"])
def test_logits_of_nf4_files_equal_those_of_dequantized_weights(frozen, saved):
    step = step_of(saved[1], frozen)
    params, _ = load_pretrained(step)
    logits = LanguageModel(step, params, None).logits(tokens_of(NUM_TOKENS))
    assert relative_error(logits, saved[2]["logits"]) <= 1e-5


def test_export_of_nf4_run_merges_into_dequantized_weights(saved, tmp_path, capsys):
    _, in_nf4, reference = saved
    write_tokenizer(in_nf4, CONFIG["vocab_size"] - 1)
    settings = config_of(in_nf4, NUM_TOKENS, dict(data=2, context=4))
    settings.precision.frozen, settings.lora = "nf4", dict(rank=2)
    settings.train.steps, settings.optimizer = 1, dict(learning_rate=0.0)
    jaxlc.train.run(settings, tmp_path / "run", batches=[{"tokens": tokens_of(NUM_TOKENS)}])
    capsys.readouterr()
    jaxlc.export(tmp_path / "run", tmp_path / "merged")
    assert "dequantized NF4" in capsys.readouterr().err
    merged = tensors_in(tmp_path / "merged")
    weights = {name: x for name, x in reference.items() if name.startswith("model.")}
    assert len(weights) == 7 * CONFIG["num_hidden_layers"]
    for name, weight in weights.items():
        np.testing.assert_array_equal(merged[name].astype(np.float32), weight)
    jaxlc.export(tmp_path / "run", tmp_path / "on_base", base=str(saved[0]), dtype="fp32")
    assert f"weights of {saved[0]} with the adapters" in capsys.readouterr().err
    base, on_base = tensors_in(saved[0]), tensors_in(tmp_path / "on_base")
    for name in weights:
        np.testing.assert_array_equal(on_base[name], base[name].astype(np.float32))
        assert (on_base[name] != merged[name].astype(np.float32)).any()
    with pytest.raises(UserError, match="base=.* has no effect"):
        jaxlc.export(tmp_path / "run", tmp_path / "no", adapters=True, base=str(saved[0]))
    jaxlc.export(tmp_path / "run", tmp_path / "adapters", adapters=True)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(in_nf4)
