"""The code of a bundle: taken in only by the word `trust=[my_pkg@<hash>]`, which names exactly the files that were agreed to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.config import plugins
from drivetrain.core import files, paths
from drivetrain.core.errors import UserError
from drivetrain.core.overrides import format_value, key_of, parse_each
from drivetrain.recipe import places
from drivetrain.recipe.reader import Recipe

if TYPE_CHECKING:
    from drivetrain.recipe.bundle import Bundle


def attach(overrides: Sequence[str], base: Recipe | None = None) -> None:
    """Make the bundles that `trust` names importable, and their options choosable. Raises UserError.

    So it does where the recipe, `base` or that of the overrides, is a bundle whose word was not given.
    """
    given = _given(overrides)
    words = [word for word in _list(given.get("trust")) if "@" in word]
    name = base.word if base is not None else str(given.get("recipe") or "")
    own = base.bundle if base is not None else _bundle_at(name)
    require_word(own, name, overrides)
    for word in words:
        _attach(own if own is not None and own.word == word else _stored(word))


def require_word(own: Bundle | None, name: str, overrides: Sequence[str]) -> None:
    """Raise UserError where a recipe's bundle is not the one that `trust` names."""
    trust = _given(overrides).get("trust")
    if own is not None and own.word not in _list(trust):
        but = f", and trust={format_value(trust)} does not name exactly its files" if trust else ""
        raise UserError(
            f"recipe={name} brings code, the package {own.package}{but}: `drivetrain recipe inspect {name}` lists it. "
            f"If you trust it, say trust=[{own.word}]"
        )


def find_in(run_dir: Path, overrides: Sequence[str]) -> None:
    """Put the bundles that `trust` names into the cache, where a run's directory has them and the cache does not."""
    for word in _list(_given(overrides).get("trust")):
        package, at, _ = word.partition("@")
        file = run_dir / f"{package}.zip"
        if at and package.isidentifier() and file.is_file():
            from drivetrain.recipe import bundle

            if bundle.stored(word) is None and (found := bundle.load(file)).word == word:
                bundle.store(found)


def needed(trust: Any, overrides: Sequence[str]) -> list[str]:
    """The words of bundles in a recorded `trust` that the overrides do not give."""
    from drivetrain.recipe.bundle import WORD

    given = _list(_given(overrides).get("trust"))
    return [word for word in _list(trust) if WORD.fullmatch(word) and word not in given]


def write(trust: Sequence[str], run_dir: Path) -> None:
    """Write the trusted bundles into a run's directory, so that the run can be resumed elsewhere."""
    for word in (word for word in trust if "@" in word):
        found = _stored(word)
        files.write_bytes(run_dir / f"{found.package}.zip", found.archive())


def brought_keys(recipe: Recipe) -> Collection[str]:
    """The keys by which a bundle's recipe names classes of its own package, as no other recipe may."""
    if recipe.bundle is None:
        return ()
    own = f"{recipe.bundle.package}."
    return {key for key, value in recipe.values.items() if key.endswith(".target") and str(value).startswith(own)}


def _given(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of recipe and trust; what cannot be parsed is reported where all overrides are."""
    wanted = [word for word in overrides if key_of(word) in ("recipe", "trust")]
    parsed = [(key_of(text), override) for text, override in parse_each(wanted, "", [])]
    return {key: override.value() for key, override in parsed if not override.is_sweep_override()}


def _list(trust: Any) -> list[str]:
    return [str(word) for word in trust] if isinstance(trust, list) else [str(trust)] if trust else []


def _bundle_at(name: str) -> Bundle | None:
    """The bundle that `recipe=` names; None for any other recipe."""
    return places.read(name).bundle if places.is_bundle(name) else None


def _stored(word: str) -> Bundle:
    """The bundle that a word of `trust` names, from the cache. Raises UserError."""
    from drivetrain.recipe import bundle

    if not bundle.WORD.match(word):
        raise UserError(f"trust=[{word}] is not of the form my_pkg@HASH, with 64 digits: `drivetrain recipe inspect` prints it")
    found = bundle.stored(word)
    if found is None:
        raise UserError(f"trust=[{word}]: there is no such bundle in the cache: name its file too, as recipe=BUNDLE.zip")
    return found


def _attach(found: Bundle) -> None:
    """Extract a trusted bundle, and put its folder last on the import path. Raises UserError."""
    from drivetrain.recipe import bundle

    folder = bundle.folder(found.word)
    if plugins.is_attached(found.package, conf := folder / found.package / "conf"):  # and verified, by this process
        return
    try:
        spec = find_spec(found.package)
    except ValueError:  # a module of that name which some program has made itself
        raise UserError(f"trust=[{found.word}]: there is a module {found.package} in this process already") from None
    where = Path(spec.origin or next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else folder
    if not where.is_relative_to(folder):
        raise UserError(
            f"trust=[{found.word}]: the package {found.package} is also at {where}, and one of the two would hide the other: "
            "give the bundle's package another name, or remove that one"
        )
    bundle.store(found)
    paths.add_trusted_code(str(bundle.extract(found)))
    plugins.attach(found.package, conf)
