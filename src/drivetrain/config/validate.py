"""Checking a composed config: every problem at once, before anything is built."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from drivetrain.config import callbacks, recipe_checks
from drivetrain.config.catalog import LISTS, SUMS, options, shipped_targets
from drivetrain.config.compose import Composed
from drivetrain.config.plugins import trusted_packages
from drivetrain.config.recipe_checks import hints
from drivetrain.core import paths, selection, target, user_code
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.files import read_yaml
from drivetrain.core.model_call import ForwardInput
from drivetrain.core.option import Count, Given, NotGiven, Option, RunSpec
from drivetrain.recipe.safe_yaml import MAX_WHOLE

_REASONS = {  # pydantic's error types
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
Epochs = Annotated[int, Ge(1), Le(1_000_000)]
_KINDS: dict[str, Any] = {  # of the keys of conf/config.yaml that are no group
    "epochs": Epochs, "updates": Count | None, "log_every": Count, "evaluate_every": Count, "output_dir": str,
    "resume": str | None, "resume_changed": bool, "trust": list[str], "recipe": str | None, "forward_input": ForwardInput,
    "callbacks": list[str], "select": recipe_checks.SELECT, "target": recipe_checks.TARGET,
}  # fmt: skip

Where = Callable[[str], str]  # key → "file:line: " of the recipe that set it, or ""


def _nowhere(key: str) -> str:
    return ""


def validate(composed: Composed, own: bool = False) -> RunSpec:
    """The config's options as objects, after their rules have passed. Raises UserError with all problems; imports no torch.

    What a recipe may not set is refused before an option is made. With `own` the recipe is a run's, which may choose own code.
    """
    plain = composed.plain
    if any("@" not in str(word) for word in plain.get("trust") or []):  # a bundle's package is found without it
        paths.add_working_directory()
    groups = options(composed.config_dirs)
    values = {k: v for k, v in plain.items() if k not in groups}
    parts, given = Given(), Given(values)
    run = RunSpec(composed.choices, given, parts, composed.from_environment)
    _decode(composed, "", _KINDS, given)
    problems = list(composed.problems)
    sections = {group: list(_sections(group, plain.get(group), composed)) for group in groups}
    trusted = trusted_packages().union(given.get("trust") or [])
    found = {p: _class(p, s, trusted, problems) for of_group in sections.values() for p, s in _with_parts(of_group)}
    classes = {prefix: cls for prefix, cls in found.items() if cls is not None}
    refused = [*([] if own else recipe_checks.code_problems(composed)), *recipe_checks.problems(composed, classes)]
    if refused:
        raise UserError(dict.fromkeys([*problems, *refused]))
    problems += _value_problems(given, composed.where)
    rightly_made: list[Option] = []
    for group in groups:
        made = [_make(prefix, section, classes, composed, problems) for prefix, section in sections[group]]
        if group in composed.doubtful or None in made:
            parts.wrong.add(group)
        else:
            parts[group] = made if group in LISTS else made[0]
        rightly_made += [] if group in composed.doubtful else [option for option in made if option is not None]
    given.wrong = {key for key, value in given.items() if any(type_problems("", {key: (_KINDS.get(key, Any), value)}))}
    for key in given.wrong:
        del given[key]
    if composed.doubtful <= set(groups):  # else a value may be missing that any rule reads
        problems += _broken_rules(run, rightly_made)
    if problems:
        raise UserError(dict.fromkeys(problems))
    run.not_for_recipes = set(recipe_checks.not_for_recipes(plain, classes))
    return run


def _broken_rules(run: RunSpec, options: Sequence[Option]) -> list[str]:
    """What the options' rules say of each other; a rule that asks for an option or a value that is wrong says nothing."""
    problems: list[str] = []
    seeing = []
    for option in options:
        with suppress(NotGiven):
            option.see(run)
            seeing.append(option)
    rules: list[Callable[[], Iterable[str]]] = [partial(option.validate, run) for option in seeing]
    rules.append(lambda: selection.problems(run, "select", run.values["select"]))
    rules.append(lambda: target.problems(run))
    for rule in rules:
        with suppress(NotGiven):
            problems.extend(rule())
    return problems


def validate_device(run: RunSpec) -> None:
    """Check the rules that need torch, the device, or a library's list of names. Raises UserError with all problems."""
    problems = [problem for option in options_of(run) for problem in option.validate_device(run)]
    problems += callbacks.problems(run)
    if problems:
        raise UserError(dict.fromkeys(problems))


def options_of(run: RunSpec) -> Iterator[Option]:
    """All options of a run."""
    return (option for _, option in _by_group(run))


def _by_group(run: RunSpec) -> Iterator[tuple[str, Option]]:
    """All options of a run, each with the key of its settings."""
    for group, made in run.parts.items():
        if isinstance(made, list):
            yield from zip((f"{group}.{name}" for name in run.names(group)), made, strict=False)
        elif made is not None:
            yield group, made


def _sections(group: str, section: Any, composed: Composed) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key of each of the group's options in the config, and its knobs."""
    if group in LISTS:
        for name in composed.choices[group]:
            if name != "none":
                yield f"{group}.{name}", (section or {})[name]
    else:
        yield group, section


def _with_parts(sections: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The sections of a group; before that of a sum, those of its parts."""
    for prefix, section in sections:
        parts = ((f"{prefix}.{k}", v) for k, v in (section or {}).items() if isinstance(v, dict) and "_target_" in v)
        yield from (*parts, (prefix, section)) if section and section.get("_target_") in SUMS.values() else [(prefix, section)]


def _class(prefix: str, section: dict[str, Any], trusted: Collection[str], problems: list[str]) -> type[Option] | None:
    """The class of an option, or None with its `problems`. No code is imported that is neither shipped nor trusted."""
    target, group = str(section.get("_target_")), prefix.split(".")[0]
    if target not in shipped_targets():
        untrusted = list(user_code.trust_problems(f"{prefix}._target_={target}", target, trusted))
        if untrusted:
            problems += untrusted
            return None
    try:
        cls = user_code.import_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        problems.append(f"{prefix}._target_={target} cannot be imported: {error}{_near(target)}")
        return None
    wrong = list(_class_problems(group, cls, target))
    problems += wrong
    return None if wrong else cls


def _make(
    prefix: str, section: dict[str, Any], classes: recipe_checks.Classes, composed: Composed, problems: list[str]
) -> Option | None:
    """One option as an object, or None with its `problems`. A sum gets the options that it adds up, from their sections."""
    knobs = {k: v for k, v in section.items() if k != "_target_"}
    if section.get("_target_") in SUMS.values():
        parts = [k for k, v in knobs.items() if isinstance(v, dict) and "_target_" in v]
        knobs["parts"] = {name: _make(f"{prefix}.{name}", knobs.pop(name), classes, composed, problems) for name in parts}
    if (cls := classes.get(prefix)) is None:
        return None
    _decode(composed, prefix, hints(cls), knobs)
    wrong = list(knob_problems(prefix, cls, knobs, composed.where))
    problems += wrong
    return None if wrong or None in knobs.get("parts", {}).values() else cls(**knobs)


def _near(target: str) -> str:
    """The end of a message about a class that is not in its module: the names that are near; "" where the module is missing."""
    module = sys.modules.get(target.rpartition(".")[0])
    names = [name for name, value in vars(module).items() if isinstance(value, type)] if module is not None else []
    return f": {did_you_mean(target.rpartition('.')[2], names)}" if names else ""


def _decode(composed: Composed, prefix: str, hints: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Turn texts from the environment into what their keys take: "0.1" into a number where a number belongs."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, str) and key in hints and composed.from_environment(name):
            with suppress(ValidationError):
                adapter = TypeAdapter(hints[key], config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))
                values[key] = composed.decoded[name] = adapter.validate_python(value)


def _class_problems(group: str, cls: Any, target: str) -> Iterator[str]:
    """The problem of a class from outside that is not an option of this group."""
    if target in shipped_targets(group):
        return
    if not isinstance(cls, type) or not issubclass(cls, Option):
        yield f"{group}._target_={target} is not an option of drivetrain: {_instead(group, target)}"
    elif _base_of(cls) not in {_base_of(user_code.import_name(shipped)) for shipped in shipped_targets(group)}:
        yield f"{group}._target_={target} is an option, but not one of {group}: its class derives from {_base_of(cls).__name__}"


def _instead(group: str, target: str) -> str:
    """What to do about a class that is no option: what ships of this name, what takes any class, or how to write an option."""
    name = target.rpartition(".")[2].lower()
    known = options()[group]
    if name in known:
        return f"{group}={name} is the option that ships for it"
    if "own" in known:
        return f"to use a class of yours as it is, set {group}=own {group}.target={target}"
    shipped = user_code.import_name(min(shipped_targets(group))).__mro__
    exported = vars(sys.modules[f"drivetrain.{group}"])
    base = next(cls.__name__ for cls in reversed(shipped[: shipped.index(Option)]) if cls.__name__ in exported)
    return f"write a class that derives from drivetrain.{group}.{base} and makes it: docs/extending.md shows one"


def _base_of(cls: type) -> type:
    """The base class of an option's group."""
    return cls.__mro__[cls.__mro__.index(Option) - 1]


def knob_problems(prefix: str, cls: type, knobs: dict[str, Any], where: Where = _nowhere) -> Iterator[str]:
    """Each knob that the constructor of `cls` does not take, and each value that its annotation excludes."""
    parameters = inspect.signature(cls).parameters
    unknown = [k for k in knobs if k not in parameters]
    yield from (f"{where(f'{prefix}.{k}')}{prefix}.{k}: {cls.__name__} takes no such argument" for k in unknown)
    yield from type_problems(prefix, {k: (hints(cls).get(k, Any), knobs[k]) for k in knobs if k in parameters}, where)


def _value_problems(values: dict[str, Any], where: Where) -> Iterator[str]:
    """What is wrong with the keys of conf/config.yaml that are not groups."""
    wrong = list(type_problems("", {k: (_KINDS.get(k, Any), v) for k, v in values.items()}, where))
    yield from wrong or [*paths.cannot_be_in(Path(values["output_dir"])), *callbacks.trust_problems(values)]


def type_problems(prefix: str, given: dict[str, tuple[Any, Any]], where: Where = _nowhere) -> Iterator[str]:
    """Key → (annotation, value): each value that its annotation excludes. Checked by pydantic, strictly: "1" is no number."""
    from pydantic import ValidationError

    for key, (hint, value) in given.items():
        if hint is Any:
            continue
        name = f"{prefix}.{key}" if prefix else key
        if _is_too_large(value):  # no library takes it, and Python makes no float of it
            yield f"{where(name)}{name}: a whole number must be below 2^63"
            continue
        try:
            _adapter(hint).validate_python(value)
        except ValidationError as error:
            text = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            yield f"{where(name)}{name}={text}: {_reason(error.errors())}"


@lru_cache(maxsize=1024)  # making one takes longer than checking a value
def _adapter(hint: Any) -> Any:
    """pydantic's check of an annotation, strictly."""
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True))


def _is_too_large(value: Any) -> bool:
    return any(map(_is_too_large, value)) if isinstance(value, list) else isinstance(value, int) and abs(value) > MAX_WHOLE


def _reason(errors: Iterable[Any]) -> str:
    """What a value must be, as one phrase."""
    reasons = []
    for error in errors:
        limit = next((f"must be {_LIMITS[k]} {v}" for k, v in error.get("ctx", {}).items() if k in _LIMITS), None)
        reason = _REASONS.get(error["type"])
        if error["type"] == "literal_error":
            reason = f"must be one of {error['ctx']['expected']}"
        reasons.append(limit or reason or error["msg"])
    return " or ".join(dict.fromkeys(reasons))


def machine_local_keys(run: RunSpec) -> set[str]:
    """The dotted keys that depend on the machine or its operator: no recipe sets them, and the config's hash leaves them out."""
    always = {"output_dir", "resume", "resume_changed", "trust", "recipe", "logger", "callbacks"}
    return always | run.not_for_recipes | {f"{group}.{k}" for group, option in _by_group(run) for k in option.machine_local_keys}


def identifying_keys(run: RunSpec) -> set[str]:
    """The machine-local keys that make another run all the same: the config's hash has them, and a resumed run keeps them."""
    return run.not_for_recipes | {f"{group}.{knob}" for group, option in _by_group(run) for knob in option.identifying_keys}


def read_config(path: Path) -> dict[str, Any]:
    """A run's config.yaml as it stands there: references are not followed, for anybody may have written the file.

    Raises OSError, and ValueError where it is no mapping of plain values, of a config's size and depth.
    """
    read_yaml(path)
    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except (OmegaConfBaseException, YAMLError, AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(found, dict):
        raise ValueError("it is no mapping")
    return found  # type: ignore[return-value]
