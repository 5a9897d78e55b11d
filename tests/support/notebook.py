"""Runs the notebook of the examples as Jupyter does. `python -m tests.support.notebook` stores what its cells show."""

import ast
import base64
import contextlib
import io
import json
from typing import Any

from tests.support.command import ROOT

FILE = ROOT / "examples/notebook/drivetrain.ipynb"


class Stream(io.StringIO):
    """A notebook's standard output, or its standard error, which is shown in red."""

    __module__ = "ipykernel.iostream"


def run(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return what a notebook stores of it."""
    tree, out, err = ast.parse(source), Stream(), Stream()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exec(compile(tree, "cell", "exec"), names)
        value = eval(ast.unparse(last), names) if last is not None else None
    streams = {"stdout": out.getvalue(), "stderr": err.getvalue()}
    stored: list[dict[str, Any]] = [
        {"output_type": "stream", "name": name, "text": text.splitlines(keepends=True)} for name, text in streams.items() if text
    ]
    if value is None:
        return stored
    data: dict[str, Any] = {"text/plain": repr(value)[:200].splitlines(keepends=True)}
    for kind, name in (("text/html", "_repr_html_"), ("image/png", "_repr_png_")):
        shown = getattr(value, name)() if hasattr(value, name) else None
        if shown is not None:
            data[kind] = base64.b64encode(shown).decode() if isinstance(shown, bytes) else shown.splitlines(keepends=True)
    return [*stored, {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}]


if __name__ == "__main__":
    notebook, names = json.loads(FILE.read_text(encoding="utf-8")), dict[str, Any]()
    for number, cell in enumerate((cell for cell in notebook["cells"] if cell["cell_type"] == "code"), 1):
        cell |= {"outputs": run("".join(cell["source"]), names), "execution_count": number}
    FILE.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
