"""usage: python scripts/run_notebooks.py [NOTEBOOK.ipynb ...]

Runs notebooks, by default all of notebooks/, and stores their outputs in place, without timestamps
and stderr and with the same metadata on every machine.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def main(paths: list[Path]) -> None:
    for path in paths:
        print(f"running {path}", flush=True)
        notebook = nbformat.read(path, as_version=4)
        # a run in notebooks/ would resume from an earlier one
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / "notebooks"
            shutil.copytree(path.parent, directory)
            client = nbclient.NotebookClient(
                notebook,
                timeout=900,  # of a cell
                record_timing=False,
                coalesce_streams=True,
                resources={"metadata": {"path": str(directory)}},
            )
            client.execute(env=os.environ | {"PYTHONPATH": str(ROOT)})
        for cell in notebook.cells:  # progress of slow machines
            if "outputs" in cell:
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = nbformat.from_dict(METADATA)
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb")))
