"""A process of a large run reads its share of a model only: sparse files in the shape of a 70B
model, and weights that two processes quantize to 4 bits.
"""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxlc.checkpoints.pretrained import load_pretrained
from jaxlc.config import load
from jaxlc.hf.load import paths_of
from jaxlc.models.quantized import is_quantized
from jaxlc.sharding.mesh import make_mesh
from jaxlc.step.step import build_step
from tests import helpers
from tests.hf.comparison import config_of
from tests.hf.models import write_model, write_nf4_model

ROOT = Path(__file__).parents[2]
SHAPE = dict(
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    head_dim=128,
)
SHARE = 64
# Loads the share of one process of 64 that shard the model dimension, as on fsdp=8 x context=8: each parameter as it is
# passed to JAX, which keeps it. Prints bytes read, bytes kept, the largest shard, and memory before and at the peak.
_PROGRAM = """
import resource, sys
from pathlib import Path
import numpy as np
from jaxlc.config import load
from ml_collections import ConfigDict
from jaxlc.config.models.families import FAMILIES
from jaxlc.hf.load import layouts_of, paths_of, read_shard, shapes_of
from jaxlc.hf.files import TensorFiles
from jaxlc.models import decoder
from tests.hf.test_large_files import SHARE

directory = Path(sys.argv[1])
model = load(ConfigDict({"model": {"init_from": str(directory)}})).model
abstract = shapes_of(model)
dims = dict(paths_of(decoder.dims_of(model)))
layouts = layouts_of(FAMILIES["llama"], model)
files = TensorFiles(directory)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = []
for path, param in abstract.items():
    parts = [SHARE if name == "model" else 1 for name in dims[path]]
    index = tuple((size // n * 5 % size, size // n * 5 % size + size // n, 1) for size, n in zip(param.shape, parts))
    kept.append(read_shard(files, layouts[path], index, param))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(files.bytes_read, sum(x.nbytes for x in kept), max(x.nbytes for x in kept), before * 1024, peak * 1024)
"""


def write_sparse_model(directory: Path) -> int:
    """Writes a Llama 70B without data, in 15 files; returns the bytes of its tensors in bf16."""
    D, F, V, H = (
        SHAPE[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    config = dict(
        SHAPE,
        model_type="llama",
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {
        "model.embed_tokens.weight": [V, D],
        "model.norm.weight": [D],
        "lm_head.weight": [V, D],
    }
    for layer in range(SHAPE["num_hidden_layers"]):
        layer_shapes = {
            "input_layernorm": [D],
            "post_attention_layernorm": [D],
            "self_attn.q_proj": [64 * H, D],
            "self_attn.k_proj": [8 * H, D],
            "self_attn.v_proj": [8 * H, D],
            "self_attn.o_proj": [D, 64 * H],
            "mlp.gate_proj": [F, D],
            "mlp.up_proj": [F, D],
            "mlp.down_proj": [D, F],
        }
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()
        }
    names, file_of, total = list(shapes), {}, 0
    for number in range(15):
        header, end = {}, 0
        for name in names[number::15]:
            start, end = end, end + 2 * shapes[name][0] * (shapes[name] + [1])[1]
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
            file_of[name] = f"model-{number + 1:05}-of-00015.safetensors"
        text = json.dumps(header).encode()
        with (directory / f"model-{number + 1:05}-of-00015.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        total += end
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    return total


@pytest.mark.full
def test_read_share_of_70b_model_is_bounded(tmp_path):
    total = write_sparse_model(tmp_path / "model")
    assert total > 140e9
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    bytes_read, kept, largest, before, peak = map(int, done.stdout.split())
    print(
        f"read {bytes_read:,} of {total:,} bytes, kept {kept:,}, peak memory {peak - before:,} above the start"
    )
    norms = (2 * SHAPE["num_hidden_layers"] + 1) * 2 * SHAPE["hidden_size"]  # replicated
    assert bytes_read == (total - norms) // SHARE + norms
    assert peak - before <= kept + 2 * largest + 2**30


MESH = dict(fsdp=2, context=2)
# Loads a model with two devices of four, and compares its shards with those of one process. Prints what it read, or the
# error.
_ONE_OF_TWO_PROCESSES = """
import sys
from pathlib import Path
import jax
directory, port, process_id, frozen = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process_id)
import numpy as np
from jaxlc.core.errors import UserError
from tests.hf.test_large_files import MESH, frozen_arrays

try:
    arrays, line = frozen_arrays(directory, MESH, frozen)
except UserError as error:
    print("error:", error)
else:
    expected = np.load(directory / "expected.npz")
    assert arrays.keys() == {*expected}
    for name, array in arrays.items():
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index], err_msg=name)
    print(line)
"""


def frozen_arrays(directory: Path, mesh: dict, frozen: str) -> tuple[dict, str]:
    """Codes, scales, maxima and offsets of frozen matrices, or the matrices, and what this process
    read.
    """
    settings = config_of(directory, 64, mesh)
    settings.precision.frozen = frozen
    settings.lora = dict(rank=2, projections=("query", "attention_projected"))
    config = load(settings)
    devices = jax.devices()[: config.mesh.num_devices]
    params, line = load_pretrained(build_step(config, make_mesh(config.mesh, devices)))
    arrays = {}
    for path, x in paths_of(params):
        if is_quantized(x):
            arrays |= {f"{path}/{name}": array for name, array in zip(x.NAMES, x.arrays)}
        elif frozen == "bf16" and x.dtype == jnp.bfloat16:
            arrays[path] = x.view(jnp.uint16)  # numpy stores no bfloat16
    return arrays, line


def run_two_processes(directory: Path, frozen: str) -> list[str]:
    """What each of two processes prints."""
    environment = os.environ | dict(XLA_FLAGS="--xla_force_host_platform_device_count=2")
    port = str(helpers.free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ONE_OF_TWO_PROCESSES, str(directory), port, str(i), frozen],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=helpers.TIMEOUT_SECONDS)
        assert process.returncode == 0, errors
        outputs.append(output)
    return outputs


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "frozen"), [("qwen3_moe", "nf4"), ("gpt_oss", "nf4"), ("nf4_files", "bf16")]
)
def test_two_processes_read_their_shards_and_have_the_values_of_one(case, frozen, tmp_path):
    """Experts in NF4, and in MXFP4: shards cut blocks of 64. Of files in NF4, each process reads
    and dequantizes its shards.
    """
    directory = tmp_path / "model"
    if case == "nf4_files":
        write_nf4_model(directory, hidden_size=256, intermediate_size=320)
    else:
        write_model(directory, case, scale=3.0)
    arrays, line = frozen_arrays(directory, {}, frozen)
    assert arrays
    np.savez(directory / "expected.npz", **arrays)
    whole = num_bytes_read(line)
    for output in run_two_processes(directory, frozen):
        # norms, biases and the maxima in NF4 files are replicated
        assert whole / 2 <= num_bytes_read(output) <= 0.52 * whole


@pytest.mark.full
def test_all_processes_raise_the_error_of_one_that_finds_nan_while_quantizing(tmp_path):
    """The first half of the inputs is read by process 0, the others by process 1."""
    directory, name = write_model(tmp_path / "model", "llama"), "model.layers.1.mlp.up_proj.weight"
    (path,) = (x for x in directory.glob("*.safetensors") if name in load_file(x))
    tensors = load_file(path)
    tensors[name][3, -1] = np.nan
    save_file(tensors, path)
    error = f"error: {name} in {path} has NaN or infinite values"
    for output in run_two_processes(directory, "nf4"):
        assert output.splitlines()[-1].startswith(error), output


def num_bytes_read(line: str) -> int:
    return int(re.search(r"([\d,]+) bytes read by this process", line)[1].replace(",", ""))
