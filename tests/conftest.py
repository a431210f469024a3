"""What must be set before jax is imported: eight simulated CPU devices, and a compilation cache between runs."""

import os
from pathlib import Path

NUM_DEVICES = 8
CACHE_DIR = Path(__file__).parents[1] / ".cache" / "jax"

os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile far longer than they run: LLVM's optimizer is left out.
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={NUM_DEVICES} --xla_backend_optimization_level=0"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE_DIR)  # keyed by jax version and program: workers may share it
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
