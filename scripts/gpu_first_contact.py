"""The first measurements on an NVIDIA GPU, in parts: kernels, training steps, memory, host memory, checkpoints.

    python scripts/gpu_first_contact.py --parts=env,fa3,kernels,rates,basics --out=out/1.jsonl --seconds=540
    python scripts/gpu_first_contact.py --parts=profile,experts,host,hoststep,steps,save --out=out/2.jsonl --seconds=540
    python scripts/gpu_first_contact.py --parts=more_kernels,more_rates,ring,workspace,long,memory,compile \
      --out=out/3.jsonl --seconds=540
    python scripts/gpu_first_contact.py --parts=long_run --out=out/4.jsonl --seconds=590
    python scripts/gpu_first_contact.py --dry_run --out=out/dry_run.jsonl

The most important rows come first. Each row is one line of --out, written when it is known. A row that fails, crashes
or hangs does not stop the others, and none starts that would not end within --seconds. At the end, constants.json next
to --out has the constants that the .jsonl files of the directory contain, for `jaxlc plan --constants` and
`jaxlc profile --constants`; rows of a dry run do not count in those of measurements.

It needs no installation of jaxlc, no data and no network: Python 3.12, JAX 0.11.2 with CUDA 13, optax, orbax, absl,
rich and scipy, and of newer packages ml_collections 1.1.0, flax 0.12.12, grain 0.2.18, portpicker 1.6.0, array_record
0.8.6 and tensorboardX 2.6.5. With dew-flash-attn-cu13 0.3.6 and tokamax 0.0.17 it also measures attention kernels fa3
and mosaic. --row continues the rows of
a part. --dry_run runs every row with small shapes on any device, in one process.
"""

import sys
from pathlib import Path

from absl import app

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.first_contact import command  # noqa: E402

if __name__ == "__main__":
    command.define_flags()
    app.run(command.main)
