"""Writes the pages of the documentation site; `make docs` runs it and then the site generator.

python -m benchmarks.site build/pages
python -m benchmarks.site --reference           # the generated parts of docs/: `make reference`
python -m benchmarks.site --figures             # docs/images/zigzag_ring.svg, layer_kinds.svg and layer_tiles.svg
python -m benchmarks.site --links               # after a change of the version or of [project.urls]: see links.py
"""

import shutil
import sys
from pathlib import Path

from benchmarks.site import links, pages


def main(arguments: list[str]) -> None:
    if arguments == ["--figures"]:
        from benchmarks.site import figures

        figures.write(pages.ROOT / "docs" / "images")
        return
    if arguments == ["--reference"]:
        for path, text in pages.reference_pages().items():
            path.write_text(text)
        return
    if arguments == ["--links"]:
        links.update()
        return
    (target,) = map(Path, arguments)
    shutil.rmtree(target, ignore_errors=True)
    pages.write(target)


if __name__ == "__main__":
    main(sys.argv[1:])
