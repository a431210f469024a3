"""Environment that must be set before jax is imported: eight simulated CPU devices, a persistent compilation cache."""

import os
from pathlib import Path

NUM_DEVICES = 8
# In the user's cache directory, so that clones and worktrees share it. JAX keys entries by its version and the program.
CACHE_DIR = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlc" / "xla"

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests spend most of their time in compilation, so LLVM's optimizer is off.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES} --xla_backend_optimization_level=0"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE_DIR)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
