"""Every error of a composed config, all at once, before anything is built."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from drivetrain.config.compose import LISTS, Composed, options
from drivetrain.core import paths
from drivetrain.core.errors import UserError
from drivetrain.core.option import Option, RunSpec
from drivetrain.core.paths import conf_dir

_KINDS = {  # pydantic's error types in our words
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "list_type": "must be a list",
    "is_instance_of": "must be a list",
    "dict_type": "must be a mapping",
    "none_required": "null",
    "finite_number": "must be finite",
    "too_short": "must not be empty",
}
_LIMITS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


Where = Callable[[str], str]  # a key → "file:line: " of the recipe that set it, or nothing


def _nowhere(key: str) -> str:
    return ""


@cache
def shipped_targets(group: str = "*") -> frozenset[str]:
    """The exact dotted names of the classes that conf/ names: the registry of what a config may make."""
    pattern = re.compile(r"^(?:  )?_target_: (\S+)", re.M)
    return frozenset(t for f in conf_dir().glob(f"{group}/*.yaml") for t in pattern.findall(f.read_text()))


def check(composed: Composed) -> RunSpec:
    """The config's options as objects, every rule asked. Raises UserError with all problems; imports no torch."""
    plain = composed.plain
    groups = options(composed.config_dirs)
    run = RunSpec(composed.choices, {k: v for k, v in plain.items() if k not in groups})
    problems = [*composed.problems, *_values(run.values, composed.where)]
    for group in groups:
        made: list[Any] = []
        for place, section in _sections(group, plain.get(group), composed):
            part = _make(place, section, run.values.get("trust") or [], composed, problems)
            made += [part] if part is not None else []
        run.parts[group] = made if group in LISTS else made[0] if made else None
    if not problems:  # rules look at whole options
        for part in parts(run):
            problems += part.validate(run)
    if problems:
        raise UserError(dict.fromkeys(problems))
    return run


def verify(run: RunSpec) -> None:
    """The rules that need torch, the device, or a library's list of names. Raises UserError with all problems."""
    problems = [problem for part in parts(run) for problem in part.validate_device(run)]
    if problems:
        raise UserError(dict.fromkeys(problems))


def parts(run: RunSpec) -> Iterator[Option]:
    """All options of a run."""
    for part in run.parts.values():
        yield from part if isinstance(part, list) else [part]


def _sections(group: str, section: Any, composed: Composed) -> Iterator[tuple[str, dict[str, Any]]]:
    if group in LISTS:
        for name in composed.choices[group]:
            if name != "none":
                yield f"{group}.{name}", (section or {})[name]
    else:
        yield group, section


def _make(place: str, section: dict[str, Any], trust: list[str], composed: Composed, problems: list[str]) -> Option | None:
    """One option, its knobs checked against its constructor's signature."""
    knobs = {k: v for k, v in section.items() if k != "_target_"}
    target = str(section.get("_target_"))
    if target not in shipped_targets() and target.split(".")[0] not in trust:
        problems.append(
            f"{place}._target_={target} is code that drivetrain does not ship: "
            f"if you trust it, say trust=[{target.split('.')[0]}] on the command line"
        )
        return None
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        problems.append(f"{place}._target_={target} cannot be imported: {error}")
        return None
    wrong = list(_no_option(place.split(".")[0], cls, target)) or list(_knobs(place, cls, knobs, composed.where))
    problems += wrong
    return None if wrong else cls(**knobs)


def _no_option(group: str, cls: Any, target: str) -> Iterator[str]:
    """The problem of a class of the user's that is no option of this group."""
    if target in shipped_targets(group):
        return
    if not isinstance(cls, type) or not issubclass(cls, Option):
        own = " An own network goes in by model=own model.target=…" if group == "model" else ""
        yield f"{group}._target_={target} is no class of drivetrain's options: derive yours from the group's base class.{own}"
    elif _kind(cls) not in {_kind(_imported(shipped)) for shipped in shipped_targets(group)}:
        yield f"{group}._target_={target} is an option, but none of {group}: its class derives from {_kind(cls).__name__}"


def _imported(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def _kind(cls: type) -> type:
    """The base class of an option's group."""
    return cls.__mro__[cls.__mro__.index(Option) - 1]


def _knobs(place: str, cls: type, knobs: dict[str, Any], where: Where = _nowhere) -> Iterator[str]:
    parameters = inspect.signature(cls).parameters
    unknown = [k for k in knobs if k not in parameters]
    yield from (f"{where(f'{place}.{k}')}{place}.{k}: {cls.__name__} takes no such argument" for k in unknown)
    # A dataclass's fields are told in the words of the modules that name them, its bases' among them.
    hints = get_type_hints(cls if is_dataclass(cls) else cls.__init__, include_extras=True)  # type: ignore[misc]
    yield from typed(place, {k: (hints.get(k, Any), knobs[k]) for k in knobs if k in parameters}, where)


def _values(values: dict[str, Any], where: Where) -> Iterator[str]:
    from drivetrain.core.option import Count

    kinds: dict[str, Any] = {
        "epochs": Count, "updates": Count | None, "log_every": Count, "evaluate_every": Count, "output_dir": str,
        "resume": str | None, "resume_changed": bool, "trust": list[str], "recipe": str | None,
    }  # fmt: skip
    wrong = list(typed("", {k: (kinds.get(k, Any), v) for k, v in values.items()}, where))
    yield from wrong or paths.cannot_be_in(Path(values["output_dir"]))


def typed(place: str, given: dict[str, tuple[Any, Any]], where: Where = _nowhere) -> Iterator[str]:
    """Each value against its annotation, by pydantic, strictly: "1" is no number and 1.5 no count."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    config = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    for key, (hint, value) in given.items():
        if hint is Any:
            continue
        try:
            TypeAdapter(hint, config=config).validate_python(value)
        except ValidationError as error:
            name = f"{place}.{key}" if place else key
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            yield f"{where(name)}{name}={shown}: {_reason(error)}"


def _reason(error: Any) -> str:
    said = []
    for e in error.errors():
        limit = next((f"must be {_LIMITS[k]} {v}" for k, v in e.get("ctx", {}).items() if k in _LIMITS), None)
        kind = _KINDS.get(e["type"])
        if e["type"] == "literal_error":
            kind = f"must be one of {e['ctx']['expected']}"
        said.append(limit or kind or e["msg"])
    return " or ".join(dict.fromkeys(said))


def machine_local_keys(run: RunSpec) -> set[str]:
    """The dotted keys that are the operator's: not in recipes, not in the config's hash."""
    own = {"output_dir", "resume", "resume_changed", "trust", "recipe", "logger"}
    for group, made in run.parts.items():
        for part in made if isinstance(made, list) else [made]:
            own |= {f"{group}.{knob}" for knob in part.machine_local_keys}
    return own


def recipe_names_code(composed: Composed) -> Iterator[str]:
    """The problems of a recipe that chooses the operator's own class."""
    for group in ("model", "data"):
        if composed.recipe is not None and composed.recipe.choices.get(group) == "own":
            yield (
                f"{composed.recipe.where(group)}: '{group}=own' is not a recipe's to choose (code is the operator's): "
                "give it on the command line"
            )


def recipe_may_not(composed: Composed, run: RunSpec) -> None:
    """Raise UserError where a recipe sets what is the operator's."""
    if composed.recipe is None:
        return
    theirs = [k for k in composed.recipe.values if k in machine_local_keys(run)]  # also what the command line sets over it
    if theirs:
        raise UserError(
            f"{composed.recipe.where(k)}: '{k}' is not a recipe's to set (paths, devices and code are the operator's): "
            "give it on the command line"
            for k in theirs
        )


def config_file(path: Path) -> dict[str, Any]:
    """A run's config.yaml, resolved."""
    return OmegaConf.to_container(OmegaConf.load(path), resolve=True)  # type: ignore[return-value]
