"""The keys and values that a recipe may set, checked before any option is made or validated: the recipe may be a stranger's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from drivetrain.config import schema
from drivetrain.config.composed import Composed
from drivetrain.config.recipe_values import followed
from drivetrain.core.errors import OperatorGives, printable
from drivetrain.core.options import allowed, selection
from drivetrain.core.options.allowed import flatten
from drivetrain.core.options.option import Option
from drivetrain.core.options.phases import Phases
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS, code_refusal, names_code

Classes = Mapping[str, type[Option]]  # the key of an option's settings → its class
OF_OPERATOR = frozenset(OPERATOR_KEYS)
# The annotations of a recipe's texts outside all groups.
SELECT = allowed.FigureName | None
TARGET = Annotated[str, allowed.Text(selection.PATTERN, "a metric and a value, as accuracy>=0.98")] | None
OUTPUT = Annotated[str, allowed.Text(r"\w{1,100}(\.\w{1,100}){0,9}", "the name of a part of the output, as logits")] | int | None
PHASES = Phases | None
OF_NO_GROUP = {"select": SELECT, "target": TARGET, "forward_output": OUTPUT, "phases": PHASES}


def problems(composed: Composed, classes: Classes) -> Iterator[str]:
    """Each key that the recipe may not set, and each value that no recipe may have, also where an override replaces it."""
    if composed.recipe is None:
        return
    for key, given in composed.recipe.values.items():
        where, value = composed.recipe.where(key), followed(given, composed.unresolved)
        if _is_machine_local(key, classes):
            yield f"{where}: a recipe cannot set '{key}' (it depends on the machine): set it on the command line"
        elif why := _value_problem(key, value, classes):
            yield f"{where}: a recipe cannot set {key}={printable(str(value)):.60}: {why}: set it on the command line"


def code_problems(composed: Composed) -> Iterator[str]:
    """The problems of a recipe that chooses model=own, data=own, loss=own or metrics=[own], which name code.

    A choice on the command line is the operator's and overrides the recipe's.
    """
    recipe = composed.recipe
    if recipe is None:
        return
    for group, option in recipe.choices.items():
        if names_code(group, option) and group not in composed.by_operator:
            yield OperatorGives(f"{recipe.where(group)}: {code_refusal(group)}")


def not_for_recipes(plain: Mapping[str, object], classes: Classes) -> Iterator[str]:
    """The dotted keys of a config that no recipe may have: the operator sets them, and a run's recipe leaves them out."""
    for prefix, cls in classes.items():
        section: Any = plain
        for part in prefix.split("."):
            section = section[part]
        for name, hint in schema.of(cls).hints.items():
            if name in section and name not in local_settings(cls):
                value = section[name]
                entries = flatten(value) if isinstance(value, dict) else {}
                yield from (f"{prefix}.{name}.{entry}" for entry, v in entries.items() if allowed.problem(hint, v, entry))
                if not isinstance(value, dict) and allowed.problem(hint, value):
                    yield f"{prefix}.{name}"


def _is_machine_local(key: str, classes: Classes) -> bool:
    return any(
        key == local or key.startswith(f"{local}.")
        for local in (
            *OF_OPERATOR,
            *(f"{prefix}.{setting}" for prefix, cls in classes.items() for setting in local_settings(cls)),
        )
    )


def local_settings(cls: type[Option]) -> tuple[str, ...]:
    """The class's machine-local settings; a sum's are its parts' settings, which have separate classes here."""
    return cls.machine_local_keys if isinstance(cls.machine_local_keys, tuple) else ()


def _value_problem(key: str, value: object, classes: Classes) -> str:
    """The reason why no recipe may have this value; "" where it may, or where there is no such key."""
    group, _, of_group = key.partition(".")
    if group in OF_NO_GROUP:
        return allowed.problem(OF_NO_GROUP[group], value, of_group)
    for prefix, cls in classes.items():
        setting, _, entry = key.removeprefix(f"{prefix}.").partition(".")
        if key.startswith(f"{prefix}.") and setting in schema.of(cls).hints:
            return allowed.problem(schema.of(cls).hints[setting], value, entry)
    return ""
