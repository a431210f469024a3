"""usage: python scripts/compare_with_transformers.py VERSION [PYTEST_ARGUMENT ...]

Compares the model families with another version of transformers than that of
tests/hf/requirements.txt, such as 4.57.6, and writes the errors to
benchmarks/DATE-transformers-VERSION.txt. The environment is .venv-transformers-VERSION. With
JAXLC_TRANSFORMERS_PYTHON, which names a Python that has that version, no environment is made.
"""

import datetime
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "tests" / "hf" / "requirements.txt"


def make_environment(version: str) -> Path:
    """The Python of an environment with this version of transformers."""
    directory = ROOT / f".venv-transformers-{version}"
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        others = [
            line
            for line in REQUIREMENTS.read_text().splitlines()
            if not line.startswith(("#", "transformers"))
        ]
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *others, f"transformers=={version}"],
            check=True,
        )
    return python


def versions_of(python: Path) -> str:
    code = "import torch, transformers; print(f'transformers {transformers.__version__}, torch {torch.__version__}')"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main(version: str, *arguments: str) -> int:
    python = Path(os.environ.get("JAXLC_TRANSFORMERS_PYTHON") or make_environment(version))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "--tb=short",
        "tests/hf/test_transformers.py",
        *arguments,
    ]
    environment = os.environ | {"JAXLC_TRANSFORMERS_PYTHON": str(python)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    today = datetime.date.today().isoformat()
    # Of each comparison: the relative errors of the logits and of the gradient that differs most.
    lines = [
        line.lstrip(".")
        for line in done.stdout.splitlines()
        if ": logits" in line or " passed" in line
    ]
    log = ROOT / "benchmarks" / f"{today}-transformers-{version}.txt"
    log.write_text(
        "\n".join([f"{today}, {versions_of(python)}, CPU, jaxlc in float32", *lines]) + "\n"
    )
    return done.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
