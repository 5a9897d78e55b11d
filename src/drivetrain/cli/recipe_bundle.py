"""`drivetrain recipe bundle` and `inspect`: a recipe with its own code as one archive, and what such an archive brings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from drivetrain.cli import arguments
from drivetrain.core.errors import DONE, UserError
from drivetrain.recipe import bundle, cache, own_code, places, reader
from drivetrain.recipe.bundle import Bundle
from drivetrain.recipe.safe_yaml import printable, read_bytes
from drivetrain.ui import fetched, terminal
from drivetrain.ui.output import echo

BUNDLE_FORM = "drivetrain recipe bundle FILE --with my_pkg [OUT.zip]"
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$")


def make(argv: Sequence[str]) -> int:
    """Write a recipe and the package that it needs into one archive."""
    parser = arguments.Parser(prog="drivetrain recipe bundle", add_help=False)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--with", dest="package")
    given = parser.parse_intermixed_args(list(argv))
    if given.package is None or not 1 <= len(given.words) <= 2:
        raise UserError(f"the form is {BUNDLE_FORM}")
    file = places.find(given.words[0])
    text = read_bytes(file)
    recipe = reader.read(file, text)
    made, left_out = bundle.make(text, _package(given.package))
    foreign = {key: name for key, name in _targets(recipe).items() if name.partition(".")[0] != made.package}
    if foreign:
        raise UserError(f"{recipe.where(k)}: {k}={name} is not in the package {made.package}" for k, name in foreign.items())
    if nameless := _nameless(recipe):
        raise UserError(
            f"{recipe.where(key.partition('.')[0])}: no class of {made.package} is named: set {key} in the recipe, "
            f"as {made.package}.Name"
            for key in nameless
        )
    out = Path(given.words[1] if len(given.words) > 1 else f"{file.stem}.zip")
    if out.suffix != places.BUNDLE:
        raise UserError(f"{out}: the name of a bundle ends in {places.BUNDLE}")
    if out.exists():
        raise UserError(f"{out} is there already: remove it or name another file")
    out.write_bytes(made.archive())
    for name in left_out:
        echo(f"left out, because a bundle has {', '.join(bundle.SUFFIXES)} files only: {name}")
    echo(f"written to {out}: {len(made.files)} files; whoever trusts it runs it by\n  {_command(made, str(out))}")
    return DONE


def inspect(argv: Sequence[str]) -> int:
    """Print what a bundle brings. Nothing of it is imported or written."""
    if len(argv) != 1:
        raise UserError("drivetrain recipe inspect needs one bundle, as mine.zip or its address")
    path = places.find(argv[0])
    if path.suffix != places.BUNDLE:
        raise UserError(f"{argv[0]} is a plain recipe, which brings no code: `drivetrain recipe show {argv[0]}` prints it")
    found = bundle.load(path)
    text = found.files[bundle.RECIPE]
    echo(f"the recipe of {argv[0]}:")
    echo("\n".join(f"  {line}".rstrip() for line in fetched.text(text).splitlines()))
    echo(f"\nits code, the package {found.package}, which has not been run:")
    rows = [(name, f"{len(content):,}", cache.sha256_of(content)) for name, content in sorted(found.code.items())]
    terminal.table(("file", "bytes", "SHA-256"), rows)
    echo(f"its import statements name: {', '.join(found.imports()) or 'nothing else'}")
    for name in found.unread():
        echo(f"  {name} is no Python that can be parsed, or is too long, so what it imports is not known")
    targets = _targets(reader.read(path / bundle.RECIPE, text))
    echo(f"the recipe names: {', '.join(f'{key}={printable(name)}' for key, name in targets.items()) or 'no class of it'}")
    echo(f"its options: {', '.join(_options(found)) or 'none'}")
    echo(f"\nit may do whatever you may. Read the code first; if you trust it, run it by\n  {_command(found, argv[0])}")
    return DONE


def _package(given: str) -> Path:
    """The folder or the single module of a package that is named, or given by its path. Nothing is imported."""
    path = Path(given)
    for candidate in (path, path.with_name(f"{path.name}.py")):
        if (candidate / "__init__.py").is_file() or (candidate.is_file() and candidate.suffix == ".py"):
            return candidate.resolve()
    spec = find_spec(given) if given.isidentifier() else None
    if spec is None or spec.origin is None or not spec.has_location:
        raise UserError(f"--with {given}: there is no package {given} (a folder with an __init__.py, or {given}.py) here")
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _targets(recipe: reader.Recipe) -> dict[str, str]:
    """The dotted names by which a recipe names classes."""
    values: dict[str, Any] = recipe.values
    return {key: str(value) for key, value in values.items() if key.endswith("target") and _DOTTED.match(str(value))}


def _nameless(recipe: reader.Recipe) -> list[str]:
    """The keys that name a class where a recipe chooses the option `own`, and that it does not set."""
    own = {group: option for group, option in recipe.choices.items() if own_code.is_own(group, option)}
    keys = [f"{group}.own.target" if isinstance(option, list) else f"{group}.target" for group, option in own.items()]
    return [key for key in keys if not recipe.values.get(key)]


def _options(found: Bundle) -> list[str]:
    """The options that a bundle's package brings, as group=option."""
    start = f"{found.package}/conf/"
    parts = [name.removeprefix(start).split("/") for name in found.code if name.startswith(start) and name.endswith(".yaml")]
    return [f"{group}={option.removesuffix('.yaml')}" for group, option in (p for p in parts if len(p) == 2)]


def _command(made: Bundle, name: str) -> str:
    return f"drivetrain train {shlex.quote(f'recipe={name}')} trust={made.word}"
