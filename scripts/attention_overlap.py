"""What of attention's communication is hidden, strategy by strategy: compiles for GPUs that are not here.

python scripts/attention_overlap.py > docs/attention_overlap.md
python scripts/attention_overlap.py --topologies=gb200:1x64 --tokens=1048576
"""

import sys

from absl import app, flags

from jaxlc import runtime
from jaxlc.config import RuntimeConfig
from jaxlc.core.errors import UserError

_TOPOLOGIES = flags.DEFINE_list("topologies", ["h100:1x8", "h100:1x64", "h100:8x8"], "NVLink domains x GPUs in each")
_TOKENS = flags.DEFINE_integer("tokens", 262_144, "of the row, over all GPUs")


def main(_) -> None:
    runtime.start(RuntimeConfig())
    from benchmarks import attention_overlap
    from jaxlc.simulate.topology import topology

    try:
        topologies = [topology(name) for name in _TOPOLOGIES.value]
        command = " ".join(["python", "scripts/attention_overlap.py", *sys.argv[1:]])
        print(attention_overlap.page(topologies, _TOKENS.value, command), end="")
    except UserError as error:
        sys.exit(f"attention_overlap: {error}")


if __name__ == "__main__":
    app.run(main)
