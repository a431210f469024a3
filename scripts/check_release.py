"""usage: python scripts/check_release.py [EXTRA ...]

Builds the wheel, installs it in a fresh environment, alone and with each extra (default: all in
pyproject.toml that need no GPU), and trains as README.md does, outside of the checkout. Prints a row for each extra;
the exit status is 1 if one fails. Nothing is published.
"""

import importlib.metadata
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Extras for GPUs, and those for work on jaxlc. A new extra is checked unless it is named here.
NOT_CHECKED = {"cuda12", "cuda13", "nvshmem", "fa3-cuda12", "fa3-cuda13", "mosaic", "dev"}
# the command of the quick start, with fewer and shorter steps
TRAIN = (
    "train", "--config=quickstart", "--config.data.sources=CHANGELOG.md", "--config.data.eval_sources=README.md",
    "--config.mesh.context=8", "--config.mesh.tensor=1", "--config.model.num_layers=1", "--workdir=runs/docs",
    "--config.train.steps=2", "--config.data.seq_len=512",
)  # fmt: skip


def main(extras: list[str]) -> int:
    print(f"Python {sys.version.split()[0]}; {time.strftime('%Y-%m-%d')}")
    print(
        "| extra | packages | JAX | seconds | result |\n| --- | --- | --- | --- | --- |", flush=True
    )
    num_failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        build = ("wheel", "--quiet", "--no-deps", "--wheel-dir", temporary, str(ROOT))
        subprocess.run([sys.executable, "-m", "pip", *build], check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        for extra in ("", *(extras or _extras())):
            directory = Path(temporary) / (extra or "none")
            directory.mkdir()
            start_seconds = time.monotonic()
            result = _check(wheel, extra, directory)
            num_failed += result != "ok"
            found = {
                each.name: each.version
                for each in importlib.metadata.distributions(
                    path=[str(path) for path in directory.glob("environment/lib/*/site-packages")]
                )
            }
            seconds = time.monotonic() - start_seconds
            row = extra or "none", len(found), found.get("jax", "none"), f"{seconds:.0f}", result
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 1 if num_failed else 0


def _extras() -> list[str]:
    """The extras to check, in the order of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [extra for extra in project["optional-dependencies"] if extra not in NOT_CHECKED]


def _check(wheel: Path, extra: str, directory: Path) -> str:
    """Installs and runs; returns "ok", or the last line of what failed."""
    venv.create(directory / "environment", with_pip=True)
    programs = directory / "environment" / "bin"
    for name in ("README.md", "CHANGELOG.md"):
        (directory / name).write_text((ROOT / name).read_text())
    requirement = f"{wheel}[{extra}]" if extra else str(wheel)
    for command in (
        [programs / "python", "-m", "pip", "install", "--quiet", requirement],
        [programs / "jaxlc", *TRAIN],
    ):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()
            return f"{Path(command[0]).name} {command[1]} failed: {lines[-1] if lines else ''}"
    return "ok"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
