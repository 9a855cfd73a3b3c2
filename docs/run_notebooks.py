"""Run the notebooks and store their outputs.

    python docs/run_notebooks.py                            # all of them
    python docs/run_notebooks.py notebooks/2_policies.ipynb

Only what a reader needs is stored: no times, no names of the machine, no identifiers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT_SECONDS = 600


def executed(path: Path) -> Any:
    """Return the notebook as it is after a run from top to bottom.

    The kernel is a process of its own, in the folder of the notebook. It imports the package of
    this checkout.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", "JAX_PLATFORMS": "cpu"}
    )
    return notebook


def cleaned(notebook: Any) -> Any:
    """Remove from a notebook what changes with every run."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        cell["id"] = f"cell-{number}"
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = {}
            if "execution_count" in output:
                output.execution_count = cell.execution_count
    return notebook


def main(argv: list[str] | None = None) -> int:
    """Run the notebooks that are given, or all."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("notebooks", type=Path, nargs="*", default=NOTEBOOKS, metavar="NOTEBOOK")
    for path in parser.parse_args(argv).notebooks:
        print(path.name)
        nbformat.write(cleaned(executed(path.resolve())), path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
