"""Runs on a stream: killed, resumed, and by another number of processes."""

import hashlib
import itertools
import json
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from jaxlc.checkpoints.files import read_meta
from jaxlc.config.command_line import parse
from jaxlc.data import data_sources
from tests.train import runs

pytestmark = pytest.mark.usefixtures("shared_programs", "without_plots")

# Makes a process write the hashes of the tokens of its sequences, one line for each step.
_RECORDED = """
import hashlib, json, os
import numpy as np
from jaxlc.train import stage_setup

_batches = stage_setup.batches

def _recorded(*sequences, **settings):
    with open(f"{directory}/{{os.getpid()}}", "w", buffering=1) as file:
        for arrays in _batches(*sequences, **settings):
            shards = [np.asarray(shard.data) for shard in arrays["tokens"].addressable_shards]
            print(json.dumps([hashlib.sha1(x).hexdigest() for x in shards]), file=file)
            yield arrays

stage_setup.batches = _recorded
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A config with a stream of three files in more than ten chunks, each of a few sequences."""
    directory = tmp_path_factory.mktemp("stream")
    path = runs.write_config(directory)
    rng = random.Random(0)
    (directory / "files").mkdir()
    for name in "abc":
        texts = [f"{name} {i} " + "word " * rng.randint(1, 40) for i in range(30)]
        content = "".join(json.dumps(dict(text=text)) + "\n" for text in texts)
        (directory / f"files/{name}.jsonl").write_text(content)
    stream = f"""
    config.data.update(sources={str(directory / "files")!r}, stream=True, stream_cache_gib=2e-5)
    config.mesh.update(fsdp=8, context=1, tensor=1)
    config.model.num_layers, config.train.global_batch_size, config.train.eval_sequences = 1, 8, 0
    return config
"""
    path.write_text(path.read_text().replace("    return config\n", stream.lstrip("\n")))
    return path


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    output = runs.train(config, workdir)
    assert re.search(r"data       stream of 3 files, 0.00 GiB, in \d\d chunks", output)
    assert "warning: the chunks of config.data.stream_cache_gib=2e-05 have few sequences" in output
    return workdir


def test_run_killed_between_checkpoints_resumes_bitwise(config, uninterrupted, tmp_path):
    run = runs.start(runs.write_slow_config(config), tmp_path)
    runs.wait_until(lambda: (tmp_path / "checkpoints" / "4").exists(), run)
    run.kill()
    run.communicate()
    output = runs.train(config, tmp_path)
    assert re.search(r"resuming from step (4|8|12) ", output), output
    assert "different sequences" not in output
    assert runs.rows(tmp_path) == runs.rows(uninterrupted)
    meta = read_meta(tmp_path / "checkpoints", 12)["stream"]
    assert meta == read_meta(uninterrupted / "checkpoints", 12)["stream"]
    assert len(meta["counts"]) == 10  # chunks


@pytest.mark.full  # three starts in other processes
def test_one_two_and_one_processes_train_every_sequence_once(config, tmp_path):
    """An epoch: the last of 12 steps has some of its sequences again."""
    source = data_sources.open(parse(["jaxlc train", f"--config={config}"]).stages[0].config)
    tokens = [source.train[i]["tokens"] for i in range(8 * 12)]
    expected = [hashlib.sha1(x.tobytes()).hexdigest() for x in tokens]
    counts = source.train.counts(8 * 12)
    source.close()
    assert len(set(expected)) == sum(counts) and len(counts) == len(source.train.chunks)

    recorded, seen = config.with_name("recorded.py"), tmp_path / "seen"
    recorded.write_text(_RECORDED.format(directory=seen) + config.read_text())
    trained = list[str]()
    for num_processes, end_step in ((1, 5), (2, 9), (1, 12)):
        seen.mkdir()
        start = runs.start_pair if num_processes == 2 else lambda *x, **y: [runs.start(*x, **y)]
        for run in start(recorded, tmp_path / "run", train__steps=end_step):
            runs.finish(run)
        files = [[*map(json.loads, path.open())] for path in seen.iterdir()]
        assert len(files) == num_processes
        for hashes in zip(*files, strict=True):  # of a step, by process
            assert {len(x) for x in hashes} == {8 // num_processes}
            step = slice(len(trained), len(trained) + 8)
            trained += itertools.chain(*hashes)
            assert Counter(trained[step]) == Counter(expected[step])
        assert len(trained) == 8 * end_step
        shutil.rmtree(seen)
