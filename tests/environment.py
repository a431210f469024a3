"""Environment variables with which tests and the processes that they start compile fast, and
compile a program once.

Imported before JAX.
"""

import importlib.metadata
import os
import shutil
import sysconfig
from pathlib import Path

_IS_JAX_0_10 = importlib.metadata.version("jax").startswith("0.10.")

# In the user's cache directory, so that clones and worktrees share it. JAX keys entries by its
# version and the program.
_CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlc" / "xla"
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(_CACHE_DIR),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

# Processes that tests start collect no garbage (tests/site), and JAX writes no Python frames into programs: together a
# fifth of the CPU time of a run of a few steps. The first process stores the compiled modules of the package, half a
# CPU second for each of the others. Commands in the documentation (tests/test_documentation.py) and of the installed
# package (tests/test_package.py) collect garbage, as for users.
_ROOT = Path(__file__).parents[1]
_PYTHONPATH = [os.environ.get("PYTHONPATH"), str(_ROOT), str(_ROOT / "tests" / "site")]
FAST_START = {
    "PYTHONPATH": os.pathsep.join(filter(None, _PYTHONPATH)),
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    "PYTHONDONTWRITEBYTECODE": "",
}

# Tests spend most of their time in compilation, not in the programs: the optimizer and, where it can be switched off
# (JAX 0.10), the slower of XLA's two code generators for CPU fusions are off. That makes compilation 3 times as fast.
FAST_COMPILATION = " ".join([
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    *(["--xla_cpu_use_fusion_emitters=false"] if _IS_JAX_0_10 else []),
])  # fmt: skip

# Nothing reads the machine code of programs for absent GPUs: tests/bin/ptxas writes empty files in place of NVIDIA's
# assembler, which takes a third of the CPU time of these compilations. The assembler runs if JAXLC_ASSEMBLE is set, as
# in tests of the kernels of the package. JAX 0.12 compiles some products only with the assembler. Processes that tests
# start inherit JAXLC_PTXAS, the path of the assembler: of the extra `plan`, or of a CUDA toolkit.
ASSEMBLER = Path(sysconfig.get_path("purelib"), "nvidia/cuda_nvcc/bin/ptxas")
_PTXAS = os.environ.get("JAXLC_PTXAS") or (
    str(ASSEMBLER) if ASSEMBLER.is_file() else shutil.which("ptxas") or "/usr/local/cuda/bin/ptxas"
)
# JAX gives XLA the directory CUDA_ROOT, whose bin/ptxas comes before others.
WITHOUT_ASSEMBLER = (
    {"JAXLC_PTXAS": _PTXAS, "CUDA_ROOT": str(_ROOT / "tests")} if _IS_JAX_0_10 else {}
)


def for_user(**variables: str) -> dict[str, str]:
    """The environment of a command or notebook of a user: without the devices of the tests.

    Args:
      variables: further ones.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))
    }
    # XLA writes errors about its own files when it loads a program of the cache
    # (jaxlc/runtime/compilation_cache.py).
    fast = CACHE | FAST_START | dict(XLA_FLAGS=FAST_COMPILATION)
    return environment | fast | dict(TF_CPP_MIN_LOG_LEVEL="3") | variables
