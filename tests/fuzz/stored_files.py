"""Valid files that jaxlc itself writes: checkpoints, token stores, plans and traces of profiles.
See `readers`.
"""

import functools
import gzip
import json
import tempfile
from pathlib import Path

import numpy as np

from jaxlc.checkpoints.files import DIGEST, digest_of, problem_of
from jaxlc.config import defaults, from_dict, load, to_dict
from jaxlc.config.models.pretrained import read_json
from jaxlc.config.schema import DataConfig
from jaxlc.core.errors import UserError
from jaxlc.data.texts.documents import Fields
from jaxlc.data.texts.sources import list_files
from jaxlc.data.tokens import store
from jaxlc.data.tokens.tokenizers import ByteTokenizer
from jaxlc.plan.report import PlanRecord
from jaxlc.posttrain.rollouts import RolloutSequences
from jaxlc.profile import trace_events
from jaxlc.profile.comparison import predict, read_run
from tests.hlo.snippets import RING
from tests.plan.sample_plan import MEMORY, plan_of
from tests.profile.xspace import Event, profile_bytes

TEXTS = "one text\n", "another text\n"


def files_below(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@functools.cache
def checkpoint() -> dict[str, bytes]:
    import orbax.checkpoint as ocp

    from jaxlc.checkpoints.files import stored_summary

    arrays = {
        "params": {
            "a": np.random.default_rng(0).standard_normal((64, 64)),
            "b": np.arange(8, dtype=np.int32),
        }
    }
    checksums = {
        f"params/{name}": stored_summary(array).checksum for name, array in arrays["params"].items()
    }
    meta = dict(
        step=1, next_row=4, config=to_dict(load(defaults())), stage=dict(name="", first_step=0)
    )
    with tempfile.TemporaryDirectory() as directory:
        items = dict(
            state=ocp.args.PyTreeSave(arrays),
            meta=ocp.args.JsonSave(meta | {DIGEST: digest_of(meta)}),
            checksums=ocp.args.JsonSave(checksums),
        )
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(Path(directory) / "1", args=ocp.args.Composite(**items))
        return files_below(Path(directory))


def array_file() -> str:
    """The name of the file with the values of the arrays."""
    return max(
        (name for name in checkpoint() if "/d/" in name), key=lambda name: len(checkpoint()[name])
    )


def read_checkpoint(directory: Path) -> None:
    if problem := problem_of(directory / "1"):
        raise UserError(problem)


def run_config() -> bytes:
    return json.dumps(to_dict(load(defaults()))).encode()


def read_run_config(directory: Path) -> None:
    """As a stranger may write it: with a valid digest."""
    from_dict(read_json(directory / "config.json"))


@functools.cache
def token_store() -> dict[str, bytes]:
    """The store of a shard, which has the names of the documents besides what other stores have."""
    with tempfile.TemporaryDirectory() as directory:
        for number, text in enumerate(TEXTS):
            Path(directory, f"{number}.txt").write_text(text)
        shard = list_files([directory]).files
        paths = store.StorePaths.of(Path(directory), "x")
        list(store.tokenize_shard(shard, paths, Fields(), DataConfig()))
        return {path.name: path.read_bytes() for path in paths if path.exists()}


def read_store(directory: Path) -> None:
    opened = store.read_store(store.StorePaths.of(directory, "x"), ByteTokenizer())
    if opened is None:
        raise UserError("the cache has no valid store")
    pieces = list(store._stored_pieces(opened))
    assert [len(piece.ids) for piece in pieces] == (np.diff(opened.offsets) - 1).tolist()


def plan() -> bytes:
    return json.dumps(plan_of(MEMORY).to_json()).encode()


def read_plan(directory: Path) -> None:
    assert PlanRecord.from_json(directory / "plan.json").title


def profile() -> dict[str, bytes]:
    compute = "Stream #13(Compute)"
    events = [
        Event(compute, f"kernel {i}", i, i + 1, dict(hlo_op="dot", hlo_module="m", name="x"))
        for i in range(3)
    ]
    steps = [Event("python", "train", 0, 1, dict(step_num=10))]
    about = dict(
        config=to_dict(load(defaults())), device_kind="NVIDIA H100 80GB HBM3", num_devices=8
    )
    return {
        "a.xplane.pb": profile_bytes({"/device:GPU:0": events, "/host:CPU": steps}),
        "step.hlo.txt.gz": gzip.compress(RING.encode(), mtime=0),
        "run.json": json.dumps(about).encode(),
    }


def read_profile(directory: Path) -> None:
    path = directory / "a.xplane.pb"
    assert trace_events.read(path).devices
    predict(read_run(path), plan="", topology_name="", constants="")


def read_rollouts(directory: Path) -> None:
    config = defaults()
    config.data.update(sources=(), seq_len=32, chat_template="chatml")
    config.posttrain.loss = "grpo"
    config.rollouts.source = "files"
    sequences = RolloutSequences(directory, load(config), ByteTokenizer(), lambda line: None)
    assert sequences[0]["tokens"].shape == (32,)
