"""Writes the pages of the documentation site and their plain text; `make docs` runs it and then the site generator.

python -m benchmarks.site build/pages build/text
python -m benchmarks.site --figures             # docs/images/zigzag_ring.svg and layer_tiles.svg
"""

import shutil
import sys
from pathlib import Path

from benchmarks.site import pages, plain_text


def main(arguments: list[str]) -> None:
    if arguments == ["--figures"]:
        from benchmarks.site import figures

        figures.write(pages.ROOT / "docs" / "images")
        return
    target, text = map(Path, arguments)
    for directory in (target, text):
        shutil.rmtree(directory, ignore_errors=True)
    pages.write(target)
    plain_text.write(target, text)


if __name__ == "__main__":
    main(sys.argv[1:])
