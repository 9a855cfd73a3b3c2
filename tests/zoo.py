"""Loads the files of ``models/`` and ``benchmarks/``, which are programs and no package."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def load(name, folder="models"):
    """Run a file and return it as a module of its own, which a test may change."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
