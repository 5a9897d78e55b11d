"""The recipe that repeats a run, with every setting of the run.

Its hash is that of the resulting config. A changed default is reported, because the hash then differs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence

from drivetrain.config.catalog import shipped_targets
from drivetrain.config.compose import compose
from drivetrain.config.composed import Composed, flatten
from drivetrain.config.plugins import trusted_packages
from drivetrain.core.errors import UserError, printable
from drivetrain.core.machine import process
from drivetrain.core.options.overrides import format_value
from drivetrain.core.typed import JsonObject
from drivetrain.core.user import code as user_code
from drivetrain.core.user.given import objects_in
from drivetrain.recipe import write
from drivetrain.recipe.reader import Recipe
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS, names_code
from drivetrain.recipe.write import HASH_DIGITS, SCHEMA, Header
from drivetrain.run import reader
from drivetrain.run.identity import is_machine_local, reads_environment

_DOTTED = re.compile(r"[A-Za-z_][\w.]*")  # needs no quotes


def to_recipe(
    composed: Composed, machine_local_keys: Collection[str], identifying_keys: Collection[str] = (), sections: str = ""
) -> str:
    """The YAML of a recipe that repeats a run: the chosen values, then the mere defaults in `unchanged:`.

    `machine_local_keys` may also name groups and keys that each user chooses. A comment names values that the run needs and a
    recipe cannot hold. `sections` is further YAML, such as a claim.
    """
    plain, given = flatten(composed.option_defaults), flatten(composed.unresolved)
    chosen, unchanged, from_outside = _parts(composed, machine_local_keys)
    declared = OPERATOR_KEYS.keys() | (keys_of_machine(composed.plain, composed.plain["trust"]) or set())
    left_out = {key for key in machine_local_keys if not is_machine_local(key, declared)}.union(from_outside)
    elsewhere = sorted(k for k, v in given.items() if k in identifying_keys and plain.get(k) != v)
    words = code_words(composed.choices, given, composed.plain["trust"] or [])
    comments = []
    if objects := objects_in(words):
        comments.append(f"# made by a program, with its {printable(' '.join(objects))}: only that program can repeat it")
    elif words:
        comments.append(f"# it runs with code of your own: give {printable(shlex.join(words))} on the command line")
    comments += [f"# {k}={json.dumps(given[k])} is not part of a recipe: give it on the command line" for k in elsewhere]
    comments += [f"# {k} came from the environment: give it on the command line" for k in from_outside]
    settings = settable(composed, machine_local_keys, left_out)
    return write.text(
        Header(SCHEMA, process.__version__, digest(settings), frozenset(left_out)),
        composed.recipe.description if composed.recipe else "",
        chosen,
        unchanged,
        "".join(f"{line}\n" for line in comments) + sections,
    )


def _parts(
    composed: Composed, machine_local_keys: Collection[str]
) -> tuple[tuple[JsonObject, JsonObject], tuple[JsonObject, JsonObject], list[str]]:
    """A run's chosen options and values, its mere defaults, and its keys from the environment."""
    outside, plain = {*OPERATOR_KEYS, *machine_local_keys}, flatten(composed.option_defaults)
    values = {
        k: v for k, v in flatten(composed.unresolved).items() if not is_machine_local(k, outside) and not k.endswith("_target_")
    }
    values = {k: v for k, v in values.items() if k not in composed.choices}  # a list group without options has no values
    from_outside = sorted(k for k, v in values.items() if reads_environment(v))
    options = {g: o for g, o in composed.choices.items() if g not in outside}
    differing = {g: o for g, o in options.items() if composed.default_choices.get(g) != o}
    changed = {k: v for k, v in values.items() if k not in from_outside and (k not in plain or plain[k] != v)}
    rest = {k: v for k, v in values.items() if k not in from_outside and k not in changed}
    return (differing, changed), ({g: o for g, o in options.items() if g not in differing}, rest), from_outside


def compared(composed: Composed, machine_local_keys: Collection[str]) -> tuple[JsonObject, JsonObject]:
    """The config of a run and its differences from the defaults, like `reader.read` from its files."""
    (options, values), (others, _), _ = _parts(composed, machine_local_keys)
    config = reader.compared(composed.unresolved, {**others, **options})
    return config, {**options, **{k: v for k, v in values.items() if k in config and k not in options}}


def code_words(choices: Mapping[str, object], values: Mapping[str, object], trust: Sequence[str]) -> list[str]:
    """The words needed on the command line, in addition to the recipe, to run a config with own code; [] without such code.

    `values` have dotted keys.
    """
    groups = {group: option for group, option in choices.items() if names_code(group, option)}
    keys = [key for group in groups for key in (f"{group}.target", f"{group}.own.target", f"{group}.collate")]
    names = {key: str(values[key]) for key in keys if values.get(key)}
    trusted = sorted({name.partition(".")[0] for name in names.values()}.intersection(trust))
    given = [f"{group}={format_value(option)}" for group, option in groups.items()]
    given += [f"{key}={name if _DOTTED.fullmatch(name) else format_value(name)}" for key, name in names.items()]
    return [*given, *([f"trust={format_value(trusted)}"] if trusted else [])]


def settable(composed: Composed, machine_local_keys: Collection[str], left_out: Collection[str] = ()) -> JsonObject:
    """The part of a config that a recipe may set: group → option, and dotted key → value.

    A reference to another key stays unresolved: it may lead to the environment, which a hash must not reveal.
    """
    outside = {*OPERATOR_KEYS, *machine_local_keys, *left_out}
    unresolved = flatten(composed.unresolved)
    every = composed.settings() | {k: v for k, v in unresolved.items() if "${" in str(v)}
    every = {k: v for k, v in every.items() if v != {} and not k.endswith("_target_")}
    return {k: v for k, v in every.items() if not is_machine_local(k, outside)}


def digest(settings: dict[str, object]) -> str:
    """The hash of `settable`: the same on every machine and in every order, and the same for 1 and 1.0."""
    text = json.dumps(_canonical(settings), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_DIGITS]


def _canonical(value: object) -> object:
    if isinstance(value, dict):
        return {str(k): _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [*map(_canonical, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def notices(recipe: Recipe | None, config_dirs: Collection[str] = (), trust: Collection[str] = ()) -> Iterator[str]:
    """A line for a recipe with a differing hash: the settings that it does not spell out, and their present values.

    None for a recipe without a hash, or one that cannot be composed, which is reported elsewhere.
    """
    if recipe is None or recipe.header.hash is None:
        return
    try:
        alone = compose([f"trust={format_value([*trust])}"], [*config_dirs], base=recipe)
    except UserError:
        return
    local = keys_of_machine(alone.plain, trust)
    if alone.problems or local is None:
        return
    spelled_out = {*recipe.choices, *recipe.values}
    left_out = {key for key in recipe.header.left_out if not any(is_machine_local(given, {key}) for given in spelled_out)}
    now = settable(alone, local, left_out)  # the file's final value counts
    if digest(now) == recipe.header.hash:
        return
    added = [f"{key}={format_value(value)}" for key, value in now.items() if key not in spelled_out]
    gone = [key for key in recipe.unchanged if key not in now and recipe.values.get(key) != {}]
    about = f"recipe {recipe.name}: {recipe.header.writer} wrote it for another config (hash {recipe.header.hash})"
    here = f"drivetrain {process.__version__}"
    if added:
        yield f"{about}: it does not record these, and with {here} they are {', '.join(sorted(added))}"
    elif not gone:  # a removed setting has its own notice
        yield f"{about}: its options or values were changed since. To share it, export it again from a run, or remove hash:"


def keys_of_machine(tree: object, trust: Collection[str] = (), prefix: str = "") -> set[str] | None:
    """The machine-local keys of a config's options, even of an invalid run; None if an option's code is not trusted."""
    found: set[str] = set()
    if not isinstance(tree, dict):
        return found
    if isinstance(target := tree.get("_target_"), str):
        if target not in shipped_targets() and any(user_code.trust_problems("", target, trusted_packages().union(trust))):
            return None
        try:
            keys = user_code.import_name(target).machine_local_keys
        except (ImportError, AttributeError, ValueError):
            return None
        found = {prefix + key for key in keys} if isinstance(keys, tuple) else set()  # a sum's are those of its parts
    for key, value in tree.items():
        below = keys_of_machine(value, trust, f"{prefix}{key}.")
        if below is None:
            return None
        found |= below
    return found
