"""Checking a composed config: every problem at once, before anything is built."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from drivetrain.config import callbacks, recipe_checks, schema, stage_configs
from drivetrain.config.catalog import LISTS, SUMS, options, shipped_targets
from drivetrain.config.composed import Composed
from drivetrain.config.plugins import trusted_packages
from drivetrain.config.schema import Schema, Where
from drivetrain.config.stage_configs import Planned
from drivetrain.core import paths, phases, selection, user_code
from drivetrain.core import stages as core_stages
from drivetrain.core.errors import UserError
from drivetrain.core.files import read_yaml
from drivetrain.core.model_call import ForwardInput
from drivetrain.core.option import Count, Option
from drivetrain.core.run_spec import CheckedValues, InvalidValue, RunSpec, Stage

Epochs = Annotated[int, Ge(1), Le(1_000_000)]
VALUES = Schema("the config", {  # the keys of conf/config.yaml that are no group
    "epochs": Epochs, "updates": Count | None, "log_every": Count, "evaluate_every": Count, "output_dir": str,
    "resume": str | None, "resume_changed": bool, "trust": list[str], "recipe": str | None, "forward_input": ForwardInput,
    "forward_output": recipe_checks.OUTPUT,
    "callbacks": list[str], "select": recipe_checks.SELECT, "target": recipe_checks.TARGET,
    "stages": list[dict[str, Any]] | None, "phases": recipe_checks.PHASES,
})  # fmt: skip


def validate(composed: Composed, own: bool = False, used: Collection[str] | None = None) -> RunSpec:
    """The config's options as objects, after their rules have passed. Raises UserError with all problems; imports no torch.

    What a recipe may not set is refused before an option is made. With `own` the recipe is a run's, which may choose own code.
    `used` names the groups that are used; None: all. Rules of others are not asked: a finished run's data may be gone.
    """
    if composed.plain.get("trust"):
        paths.add_working_directory()
    problems = list(composed.problems)
    whole = _make_run(composed, own, problems)
    run, stages = whole.run, _make_stages(whole, own, problems)
    told: dict[str, None] = {}  # what is wrong with the run is not said again of its stages
    for made in (whole, *stages):
        told |= dict.fromkeys(made.problem(line) for line in made.broken_rules(used) if line not in told)
    problems += told
    if not problems and used is None:
        problems += core_stages.problems(run)
    if problems:
        raise UserError(dict.fromkeys(problems))
    run.not_for_recipes = set(recipe_checks.not_for_recipes(composed.plain, whole.classes))
    if any(set(recipe_checks.not_for_recipes(m.composed.plain, m.classes)) - run.not_for_recipes for m in stages):
        run.not_for_recipes.add("stages")
    return run


@dataclass
class _Made:
    """A config, of a run or of one of its stages, with the options that could be made of it."""

    composed: Composed
    run: RunSpec
    classes: recipe_checks.Classes
    options: list[Option]  # those that were made rightly, resolved
    stage: Planned | None = None

    def problem(self, line: str) -> str:
        """A problem of this config, for messages."""
        return line if self.stage is None else f"{self.stage.label}: {line}"

    def broken_rules(self, used: Collection[str] | None) -> list[str]:
        """The rules of its options that are broken; none where a value may be missing that any rule reads."""
        return _broken_rules(self.run, self.options, used) if _all_known(self.composed) else []


def _all_known(composed: Composed) -> bool:
    """True if all words were understood, but for those of some groups."""
    return composed.doubtful <= set(options(composed.config_dirs))


def _make_stages(whole: _Made, own: bool, problems: list[str]) -> list[_Made]:
    """Compose and make the stages of a run, and let the run know them."""
    if not isinstance(whole.run.values.get("stages"), list):  # none, or they are wrong
        return []
    made = []
    bases = {group: _base_of(user_code.import_name(min(shipped_targets(group)))) for group in options()}
    plan = stage_configs.plan(whole.composed, bases, problems)
    whole.composed.notices += stage_configs.repeated(plan)
    for planned in plan:
        wrong = list(planned.composed.problems)
        made.append(_make_run(planned.composed, own, wrong, planned))
        problems += [made[-1].problem(line) for line in wrong if line not in problems]
    runs = [whole.run, *(each.run for each in made)]
    for run in runs:
        run.stages = [Stage(m.stage.until, m.stage.changes, m.run) for m in made if m.stage is not None]
    if not problems:
        problems += core_stages.set_batches(runs)
    return made


def _make_run(composed: Composed, own: bool, problems: list[str], stage: Planned | None = None) -> _Made:
    """The options of a config. What is wrong with them is added to `problems`."""
    plain = composed.plain
    groups = options(composed.config_dirs)
    values = {k: v for k, v in plain.items() if k not in groups}
    parts, given = CheckedValues(), CheckedValues(values)
    run = RunSpec(composed.choices, given, parts, composed.from_environment)
    _decode(composed, "", VALUES, given)
    sections = {group: list(_sections(group, plain.get(group), composed)) for group in groups}
    trusted = trusted_packages().union(given.get("trust") or [])
    found = {p: _class(p, s, trusted, problems) for of_group in sections.values() for p, s in _with_parts(of_group)}
    classes = {prefix: cls for prefix, cls in found.items() if cls is not None}
    problems += [] if own else recipe_checks.code_problems(composed)
    if refused := list(recipe_checks.problems(composed, classes)):
        raise UserError(dict.fromkeys([*problems, *refused]))
    wrong = dict(_wrong_values(given, composed.where))
    problems += [line for lines in wrong.values() for line in lines]
    problems += [] if wrong else [*paths.cannot_be_in(Path(given["output_dir"])), *callbacks.trust_problems(given)]
    every: dict[str, list[Option | None]] = {}
    for group in groups:
        made = [_make(prefix, section, classes, composed, problems) for prefix, section in sections[group]]
        every[group] = [] if group in composed.doubtful else made
        if group in composed.doubtful or None in made:
            parts.wrong.add(group)
        else:
            parts[group] = made if group in LISTS else made[0]
    given.wrong = set(wrong)
    for key in given.wrong:
        del given[key]
    return _Made(composed, run, classes, list(_resolve(run, every)) if _all_known(composed) else [], stage)


def _resolve(run: RunSpec, made: Mapping[str, Sequence[Option | None]]) -> Iterator[Option]:
    """Resolve the options of a run, group by group; those that ask for what is wrong are left out."""
    for group, of_group in made.items():
        resolved = []
        for option in of_group:
            with suppress(InvalidValue):
                resolved += [option.resolve(run)] if option is not None else []
        if group in run.parts:
            run.parts[group] = resolved if group in LISTS else next(iter(resolved), run.parts[group])
        yield from resolved


def _broken_rules(run: RunSpec, options: Sequence[Option], used: Collection[str] | None) -> list[str]:
    """The problems that options' rules find; a rule that asks for an option or a value that is wrong says nothing."""
    problems: list[str] = []
    asked = options if used is None else [option for option in options_of(run, used) if option in options]
    rules: list[Callable[[], Iterable[str]]] = [partial(option.rules, run) for option in asked]
    if used is None:
        rules.append(lambda: selection.problems(run, "select", run.values["select"]))
        rules.append(lambda: selection.target_problems(run))
        rules.append(lambda: phases.problems(run))
    for rule in rules:
        with suppress(InvalidValue):
            problems.extend(rule())
    return problems


def validate_device(run: RunSpec, used: Collection[str] | None = None) -> None:
    """Check the rules that need torch, the device, or a library's list of names. Raises UserError with all problems.

    `used` is as in `validate`.
    """
    problems = [problem for option in options_of(run, used) for problem in option.validate_device(run)]
    problems += callbacks.problems(run)
    if problems:
        raise UserError(dict.fromkeys(problems))


def options_of(run: RunSpec, used: Collection[str] | None = None) -> Iterator[Option]:
    """All options of a run, or those of the groups that are `used`."""
    return (option for key, option in _by_group(run) if used is None or key.partition(".")[0] in used)


def _by_group(run: RunSpec) -> Iterator[tuple[str, Option]]:
    """All options of a run, each with the key of its settings."""
    for group, made in run.parts.items():
        if isinstance(made, list):
            yield from zip((f"{group}.{name}" for name in run.names(group)), made, strict=False)
        elif made is not None:
            yield group, made


def _sections(group: str, section: Any, composed: Composed) -> Iterator[tuple[str, dict[str, Any]]]:
    """The key of each of the group's options in the config, and its settings."""
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


def _class(prefix: str, section: dict[str, object], trusted: Collection[str], problems: list[str]) -> type[Option] | None:
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
        problems.append(f"{prefix}._target_={target} cannot be imported: {error}{_near(target, group)}")
        return None
    wrong = list(_class_problems(group, cls, target))
    problems += wrong
    return None if wrong else cls


def _make(
    prefix: str, section: dict[str, Any], classes: recipe_checks.Classes, composed: Composed, problems: list[str]
) -> Option | None:
    """One option as an object, or None with its `problems`. A sum gets the options that it adds up, from their sections."""
    settings = {k: v for k, v in section.items() if k != "_target_"}
    if section.get("_target_") in SUMS.values():
        parts = [k for k, v in settings.items() if isinstance(v, dict) and "_target_" in v]
        settings["parts"] = {name: _make(f"{prefix}.{name}", settings.pop(name), classes, composed, problems) for name in parts}
    if (cls := classes.get(prefix)) is None:
        return None
    _decode(composed, prefix, schema.of(cls), settings)
    wrong = list(schema.of(cls).problems(prefix, settings, composed.where))
    problems += wrong
    return None if wrong or None in settings.get("parts", {}).values() else cls(**settings)


def _near(target: str, group: str) -> str:
    """The end of a message about a class that cannot be imported: similar ones there and in drivetrain; "" without one."""
    known = {name.rpartition(".")[2]: name for name in shipped_targets(group)}
    if module := sys.modules.get(target.rpartition(".")[0]):
        known |= {name: f"{module.__name__}.{name}" for name, value in vars(module).items() if isinstance(value, type)}
    near = get_close_matches(target.rpartition(".")[2], known)
    return f": did you mean {' or '.join(repr(known[name]) for name in near)}?" if near else ""


def _decode(composed: Composed, prefix: str, takes: Schema, values: dict[str, object]) -> None:
    """Turn texts from the environment into what their keys take: "0.1" into a number where a number belongs."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, str) and key in takes.hints and composed.from_environment(name):
            values[key] = composed.decoded[name] = takes.read(key, value)


def _class_problems(group: str, cls: object, target: str) -> Iterator[str]:
    """The problem of a class from outside that is not an option of this group."""
    if target in shipped_targets(group):
        return
    if not isinstance(cls, type) or not issubclass(cls, Option):
        yield f"{group}._target_={target} is not an option of drivetrain: {_instead(group, target)}"
    elif _base_of(cls) not in {_base_of(user_code.import_name(shipped)) for shipped in shipped_targets(group)}:
        yield f"{group}._target_={target} is an option, but not one of {group}: its class derives from {_base_of(cls).__name__}"


def _instead(group: str, target: str) -> str:
    """The remedy for a class that is no option: what ships of this name, what takes any class, or how to write an option."""
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


def _wrong_values(values: Mapping[str, object], where: Where) -> Iterator[tuple[str, list[str]]]:
    """The keys of conf/config.yaml that are no group and whose values are wrong, and what is wrong with them."""
    for key, value in values.items():
        wrong = list(VALUES.problems("", {key: value}, where)) if key in VALUES.hints else []
        wrong += _phase_problems(value, where) if key == "phases" else []
        if wrong:
            yield key, wrong


def _phase_problems(given: object, where: Where) -> Iterator[str]:
    """The problems of the settings of the phases of an update."""
    for name, settings in given.items() if isinstance(given, dict) else ():
        if isinstance(settings, dict) and "parameters" in settings:
            yield from schema.of(phases.Phase).problems(f"phases.{name}", settings, where)
        else:
            yield f"{where('phases')}phases.{name}={settings}: give the parameters that it trains, as {{parameters: [{name}]}}"


def machine_local_keys(run: RunSpec) -> set[str]:
    """The dotted keys that depend on the machine or its operator: no recipe sets them, and the config's hash leaves them out."""
    always = {"output_dir", "resume", "resume_changed", "trust", "recipe", "logger", "callbacks"}
    return always | run.not_for_recipes | {f"{group}.{k}" for group, option in _by_group(run) for k in option.machine_local_keys}


def identifying_keys(run: RunSpec) -> set[str]:
    """The machine-local keys that make another run all the same: the config's hash has them, and a resumed run keeps them."""
    return run.not_for_recipes | {f"{group}.{setting}" for group, option in _by_group(run) for setting in option.identifying_keys}


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
