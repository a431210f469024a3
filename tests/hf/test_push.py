"""Uploads of exports to a stand-in of the Hugging Face hub on loopback.

The command runs in another process, since huggingface_hub reads its environment when it is imported.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests import environment, helpers
from tests.hf.hub_stand_in import TOKEN, Hub, Repo, serving
from tests.train.runs import write_untrained_run

# Runs `jaxlc export` for each list of arguments; prints the exit statuses.
SCRIPT = """
import json, sys
from jaxlc.cli import main_of
print([main_of("export")(["jaxlc export", *call]) for call in json.loads(sys.argv[1])])
"""


def export(hub: Hub, tmp_path: Path, *calls: list[str], token: str = TOKEN) -> str:
    env = environment.for_user(
        HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT=hub.url, HF_HUB_DISABLE_XET="1", HF_TOKEN=token
    )
    command = [sys.executable, "-c", SCRIPT, json.dumps(calls)]
    result = subprocess.run(
        command, env=env, text=True, capture_output=True, timeout=helpers.TIMEOUT_SECONDS
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_push_is_one_private_commit_with_a_card_also_when_repeated(tmp_path: Path):
    run, outs = write_untrained_run(tmp_path / "run"), [str(tmp_path / name) for name in "abc"]
    (run / "checkpoints" / "evaluations.json").write_text('{"1": {"eval_loss": 2.5}}')
    push = "--push_to_hub=org/tiny"
    with serving() as hub:
        hub.repos["models/others/kept"] = Repo()
        hub.repos["models/others/kept"].commit({"README.md": b""})
        output = export(
            hub,
            tmp_path,
            [str(run), outs[0], "--push_to_hub=others/kept"],
            [str(run), outs[0], "--push_to_hub=others/tiny"],
            [str(run), outs[0], "--push_to_hub=tiny"],
            [str(run), outs[1], push, "--max_shard_gb=1e-5"],
            [str(run), outs[2], push],
        )
        assert "[2, 2, 2, 0, 0]" in output and "cannot write to others/tiny of the hub" in output
        assert "cannot write to others/kept of the hub" in output
        assert "expected ORGANIZATION/NAME" in output and not Path(outs[0]).exists()
        repo = hub.repos["models/org/tiny"]
        assert repo.is_private and len(repo.messages) == 3  # the first one makes the repository
        first, second = [*repo.commits.values()][1:]
        assert sum(name.endswith(".safetensors") for name in first) > 1
        for out, files in ((outs[1], first), (outs[2], second)):
            written = {path.name: path.read_bytes() for path in Path(out).iterdir()}
            assert {name: x for name, x in files.items() if name != ".gitattributes"} == written
        card = second["README.md"].decode()
        assert "| eval_loss | 2.5 |" in card and "- python-stdlib" in card and "seq_len=64" in card
