"""`drivetrain recipe schema`: the JSON Schema of recipes, for editors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from drivetrain.cli import arguments
from drivetrain.config import catalog
from drivetrain.core.errors import DONE, UserError
from drivetrain.ui.output import echo


def command(argv: Sequence[str]) -> int:
    """Print the schema, or write it to FILE, which it replaces; the exit code. An editor uses it as docs/recipes.md says."""
    from drivetrain.config.recipe_schema import recipe_schema

    given = arguments.parse("recipe schema", argv, "")
    assert given is not None  # `drivetrain recipe` has answered --help
    if len(given.overrides) > 1:
        raise UserError(f"drivetrain recipe schema writes one file: leave out {' '.join(given.overrides[1:])}")
    if problems := catalog.problems(given.config_dir):
        raise UserError(problems)
    text = json.dumps(recipe_schema(given.config_dir), indent=1, ensure_ascii=False) + "\n"
    if not given.overrides:
        echo(text, end="")
        return DONE
    file = Path(given.overrides[0])
    if file.suffix != ".json":
        raise UserError(f"drivetrain recipe schema {file} writes JSON: give a file such as {file.with_suffix('.schema.json')}")
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}") from None
    echo(f"written to {file}: a recipe that begins with `# yaml-language-server: $schema={file}` is completed and checked by it")
    return DONE
