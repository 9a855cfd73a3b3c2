"""Which models come with the package, and which sizes do they take?"""

from __future__ import annotations

import argparse
import ast
from typing import Any

from remat_kit._cli.output import answer, check_writable
from remat_kit._errors import unknown
from remat_kit._program.builder import packaged_models


def models_command(options: argparse.Namespace) -> None:
    from remat_kit._show.table import Table

    check_writable(options.json)
    name = options.name
    if name is not None and name not in packaged_models():
        raise unknown("model", name, packaged_models(), call=f"remat-kit models {name}")
    found = [described(name)] if name else [described(each) for each in packaged_models()]
    if name:
        answer(options, found[0], [_text(found[0])])
        return
    rows = tuple((model["name"], model["description"]) for model in found)
    table = Table("models", ("model", "what it is"), rows)
    answer(options, {"models": found}, [table])


def described(name: str) -> dict[str, Any]:
    """Return what the file of a packaged model says, which is read and not run.

    >>> gpt = described("gpt")
    >>> gpt["sizes"]["batch"], gpt["sizes"]["dtype"]
    (8, 'f32')
    """
    path = packaged_models()[name]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (build,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "build")
    names = [argument.arg for argument in build.args.args + build.args.kwonlyargs]
    values = [*build.args.defaults, *build.args.kw_defaults]
    sizes = {n: ast.literal_eval(v) for n, v in zip(names, values, strict=True) if v is not None}
    for argument in ("policy", "materialize", "seed"):
        sizes.pop(argument, None)
    about = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("`", "")
    return {
        "name": name,
        "description": " ".join(about.split()),
        "sizes": sizes,
        "file": str(path),
    }


def _text(model: dict[str, Any]) -> str:
    sizes = " ".join(f"{k}={'' if v is None else v}" for k, v in model["sizes"].items())
    lines = {"about": model["description"], "sizes": sizes, "file": model["file"]}
    rows = [f"  {name:<7} {text}" for name, text in lines.items()]
    return "\n".join([model["name"], *rows])
