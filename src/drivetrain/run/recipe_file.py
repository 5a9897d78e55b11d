"""The recipe that repeats a run, with every knob that the run had."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from drivetrain.config.compose import Composed
from drivetrain.core import process
from drivetrain.core.overrides import format_value
from drivetrain.recipe import write
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS, names_code, printable
from drivetrain.recipe.write import SCHEMA, Header
from drivetrain.run import drift
from drivetrain.run.identity import flatten, is_machine_local, reads_environment

_DOTTED = re.compile(r"[A-Za-z_][\w.]*")  # needs no quotes


def to_recipe(
    composed: Composed, machine_local_keys: Collection[str], identifying_keys: Collection[str] = (), sections: str = ""
) -> str:
    """The YAML of a recipe that repeats a run: what was chosen, then in `unchanged:` what was merely a default.

    `machine_local_keys` may also name groups and keys that the recipe leaves to whoever runs it. A comment names what it cannot
    hold, but the run needs. `sections` is further YAML, such as a claim.
    """
    outside = {*OPERATOR_KEYS, *machine_local_keys}
    plain, given = flatten(composed.option_defaults), flatten(composed.unresolved)
    values = {k: v for k, v in given.items() if not is_machine_local(k, outside) and not k.endswith("_target_")}
    values = {k: v for k, v in values.items() if k not in composed.choices}  # a list group without options has no values
    from_outside = sorted(k for k, v in values.items() if reads_environment(v))
    declared = OPERATOR_KEYS.keys() | (drift.machine_local_keys(composed.plain, composed.plain["trust"]) or set())
    left_out = {key for key in machine_local_keys if not is_machine_local(key, declared)}.union(from_outside)
    options = {g: o for g, o in composed.choices.items() if g not in outside}
    differing = {g: o for g, o in options.items() if composed.default_choices.get(g) != o}
    changed = {k: v for k, v in values.items() if k not in from_outside and (k not in plain or plain[k] != v)}
    rest = {k: v for k, v in values.items() if k not in from_outside and k not in changed}
    elsewhere = sorted(k for k, v in given.items() if k in identifying_keys and plain.get(k) != v)
    words = code_words(composed.choices, given, composed.plain["trust"] or [])
    comments = []
    if words:
        comments.append(f"# it runs with code of your own: give {printable(shlex.join(words))} on the command line")
    comments += [f"# {k}={json.dumps(given[k])} is not part of a recipe: give it on the command line" for k in elsewhere]
    comments += [f"# {k} came from the environment: give it on the command line" for k in from_outside]
    settings = drift.settable(composed, machine_local_keys, left_out)
    return write.text(
        Header(SCHEMA, process.__version__, drift.digest(settings), frozenset(left_out)),
        composed.recipe.description if composed.recipe else "",
        (differing, changed),
        ({g: o for g, o in options.items() if g not in differing}, rest),
        "".join(f"{line}\n" for line in comments) + sections,
    )


def code_words(choices: Mapping[str, Any], values: Mapping[str, Any], trust: Sequence[str]) -> list[str]:
    """What the operator says beside the recipe of a config to run it with its code; [] where it has none.

    `values` have dotted keys.
    """
    groups = {group: option for group, option in choices.items() if names_code(group, option)}
    keys = [key for group in groups for key in (f"{group}.target", f"{group}.own.target", f"{group}.collate")]
    names = {key: str(values[key]) for key in keys if values.get(key)}
    trusted = sorted({name.partition(".")[0] for name in names.values()}.intersection(trust))
    given = [f"{group}={format_value(option)}" for group, option in groups.items()]
    given += [f"{key}={name if _DOTTED.fullmatch(name) else format_value(name)}" for key, name in names.items()]
    return [*given, *([f"trust={format_value(trusted)}"] if trusted else [])]
