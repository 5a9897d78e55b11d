"""Checks a composed config: all problems at once, before anything is built."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

from annotated_types import Ge, Le
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config import callbacks, recipe_checks, schema, stage_configs
from drivetrain.config.catalog import LISTS, PARTS, content, option_files, options, shipped_targets
from drivetrain.config.composed import Composed, references
from drivetrain.config.plugins import trusted_packages
from drivetrain.config.schema import Schema, Where
from drivetrain.config.stage_configs import Planned
from drivetrain.core.errors import UserError, collecting, did_you_mean, refuse
from drivetrain.core.machine import paths
from drivetrain.core.machine.files import read_yaml
from drivetrain.core.options import phases, selection
from drivetrain.core.options import stages as core_stages
from drivetrain.core.options.option import Count, Effect, Option
from drivetrain.core.options.run_spec import CheckedValues, InvalidValue, RunSpec, Stage
from drivetrain.core.step.model_call import ForwardInput
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.core.user import code as user_code

Epochs = Annotated[int, Ge(1), Le(1_000_000)]
VALUES = Schema("the config", {  # the keys of conf/config.yaml that are not groups
    "epochs": Epochs, "updates": Count | None, "log_every": Count, "evaluate_every": Count, "evaluate_batch": Count | None,
    "output_dir": str,
    "resume": str | None, "resume_changed": bool, "trust": list[str], "recipe": str | None, "forward_input": ForwardInput,
    "forward_output": recipe_checks.OUTPUT,
    "callbacks": list[str], "select": recipe_checks.SELECT, "target": recipe_checks.TARGET,
    "stages": list[dict[str, Any]] | None, "phases": recipe_checks.PHASES,
})  # fmt: skip


def validate(composed: Composed, own: bool = False, used: Collection[str] | None = None) -> RunSpec:
    """The config's options as objects, after passing their rules. Raises UserError with all problems; imports no torch.

    Keys forbidden to a recipe are refused before any option is made. With `own` the recipe is a run's, which may choose own
    code. `used` names the groups in use; None: all. Rules of other groups are skipped: a finished run's data may be gone.
    """
    if composed.plain.get("trust"):
        paths.add_working_directory()
    problems = list(composed.problems)
    whole = _make_run(Planned("", None, {}, composed), own, problems)
    run, stages = whole.run, _make_stages(whole, own, problems)
    told: dict[str, None] = {}  # problems of the run are not repeated for its stages
    for made in (whole, *stages):
        told |= dict.fromkeys(made.problem(line) for line in made.broken_rules(used) if line not in told)
    problems += told
    if not problems and used is None:
        problems += core_stages.problems(run)
    refuse(problems)
    run.not_for_recipes = set(recipe_checks.not_for_recipes(composed.plain, whole.classes))
    if any(set(recipe_checks.not_for_recipes(m.plan.composed.plain, m.classes)) - run.not_for_recipes for m in stages):
        run.not_for_recipes.add("stages")
    return run


@dataclass
class _Made:
    """A config of a run or a stage, with the options that could be made."""

    plan: Planned  # with a label for a stage, without one for the run itself
    run: RunSpec
    classes: recipe_checks.Classes
    options: list[Option]  # correctly made options, resolved; none if a value that any rule reads may be missing

    def problem(self, line: str) -> str:
        """A problem with this config's label, for messages."""
        return f"{self.plan.label}: {line}" if self.plan.label else line

    def broken_rules(self, used: Collection[str] | None) -> list[str]:
        """The broken rules of its options."""
        return _broken_rules(self.run, self.options, used) if _all_known(self.plan.composed) else []


def _all_known(composed: Composed) -> bool:
    """True if all words were understood, except those of some groups."""
    return composed.doubtful <= set(options(composed.config_dirs))


def _make_stages(whole: _Made, own: bool, problems: list[str]) -> list[_Made]:
    """Compose and make the stages of a run, and add them to the run."""
    if not isinstance(whole.run.values.get("stages"), list):  # none, or they are wrong
        return []
    made = []
    plan = stage_configs.plan(whole.plan.composed, {group: _base(group) for group in options()}, problems)
    whole.plan.composed.notices += stage_configs.repeated(plan)
    for planned in plan:
        wrong = list(planned.composed.problems)
        made.append(_make_run(planned, own, wrong))
        problems += [made[-1].problem(line) for line in wrong if line not in problems]
    runs = [whole.run, *(each.run for each in made)]
    for run in runs:
        run.stages = [Stage(m.plan.until, m.plan.changes, m.run) for m in made]
    if not problems:
        problems += [*core_stages.set_batches(runs), *core_stages.set_lengths(whole.run)]
    return made


def _make_run(plan: Planned, own: bool, problems: list[str]) -> _Made:
    """The options of a config. Their problems are added to `problems`."""
    composed = plan.composed
    groups = options(composed.config_dirs)
    values, wrong = _checked("", VALUES, composed.plain, groups, composed)
    wrong |= _wrong_phases(values["phases"], composed.where) if "phases" not in wrong else {}
    given, parts = CheckedValues(values), CheckedValues()
    run = RunSpec(composed.choices, given, parts, composed.from_environment)
    given.wrong = {key.partition(".")[0] for key in wrong}
    for key in given.wrong:
        del given[key]
    sections = {group: dict(_sections(group, composed)) for group in groups}
    classes = _classes(sections, trusted_packages().union(given.get("trust") or []), problems)
    problems += [] if own else recipe_checks.code_problems(composed)
    if refused := list(recipe_checks.problems(composed, classes)):
        raise UserError(dict.fromkeys([*problems, *refused]))
    problems += wrong.values()
    problems += [] if wrong else [*paths.cannot_be_in(Path(given["output_dir"])), *callbacks.trust_problems(given)]
    made: dict[str, Option | None] = {}
    of_groups: dict[str, list[Option | None]] = {}
    for group, of_group in sections.items():
        for prefix, section in of_group.items():
            made[prefix] = _make(prefix, section, classes.get(prefix), made, composed, problems)
        its = [made[prefix] for prefix in (of_group if group in LISTS else [group])]
        of_groups[group] = [] if group in composed.doubtful else its
        if group in composed.doubtful or None in its:
            parts.wrong.add(group)
        else:
            parts[group] = its if group in LISTS else its[0]
    return _Made(plan, run, classes, list(_resolve(run, of_groups)) if _all_known(composed) else [])


def _checked(
    prefix: str, takes: Schema, section: JsonObject, but: Container[str], composed: Composed
) -> tuple[JsonObject, dict[str, str]]:
    """Check a section of the config, except the keys `but`. Return a copy of the values, and key → problem.

    Texts from the environment become what their keys take, in the section too.
    """
    given = {key: value for key, value in section.items() if key not in but}
    names = {key: f"{prefix}.{key}" if prefix else key for key, value in given.items() if isinstance(value, str)}
    texts = {key for key, name in names.items() if composed.from_environment(name)}
    values, wrong = takes.check(prefix, given, composed.where, texts)
    section |= {key: values[key] for key in texts}
    return deepcopy(values), wrong


def _resolve(run: RunSpec, made: Mapping[str, Sequence[Option | None]]) -> Iterator[Option]:
    """Resolve the options of a run, group by group; options with wrong requests are left out."""
    for group, of_group in made.items():
        resolved = []
        for option in of_group:
            with suppress(InvalidValue):
                resolved += [option.returned("resolve", option.resolve(run))] if option is not None else []
        if group in run.parts:
            run.parts[group] = resolved if group in LISTS else next(iter(resolved), run.parts[group])
        yield from resolved


def problems_of(run: RunSpec) -> list[str]:
    """The problems found by the rules of a run's options."""
    return _broken_rules(run, [*options_of(run)], None)


def _broken_rules(run: RunSpec, options: Sequence[Option], used: Collection[str] | None) -> list[str]:
    """The problems found by options' rules; a rule that depends on a wrong option or value is silent."""
    problems: list[str] = []
    asked = options if used is None else [option for option in options_of(run, used) if option in options]
    rules: list[Callable[[], Iterable[str]]] = [partial(option.rules, run) for option in asked]
    if used is None:
        rules.append(lambda: selection.problems(run, "select", selection.chosen(run)))
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
    problems = [
        problem for option in options_of(run, used) for problem in option.returned("validate_device", option.validate_device(run))
    ]
    problems += callbacks.problems(run)
    refuse(problems)


def options_of(run: RunSpec, used: Collection[str] | None = None) -> Iterator[Option]:
    """All options of a run, or those of the groups `used`."""
    return (option for key, option in _by_group(run) if used is None or key.partition(".")[0] in used)


def _by_group(run: RunSpec) -> Iterator[tuple[str, Option]]:
    """All options of a run, each with the key of its settings."""
    for group, made in run.parts.items():
        if isinstance(made, list):
            yield from zip((f"{group}.{name}" for name in run.names(group)), made, strict=False)
        elif made is not None:
            yield group, made


def _sections(group: str, composed: Composed) -> Iterator[tuple[str, JsonObject]]:
    """The key and settings of each option of a group in the config; a sum's parts come before the sum."""
    section, choice = composed.plain.get(group) or {}, composed.choices[group]
    parts = section.get(PARTS[group]) if group in PARTS else None
    for name, given in parts.items() if isinstance(parts, dict) else ():
        option = given.get("option") if isinstance(given, dict) else None
        file = option_files(composed.config_dirs)[group].get(str(option))
        if file is None:
            known = did_you_mean(str(option), options(composed.config_dirs)[group])
            raise UserError(f"{group}.{PARTS[group]}.{name}.option={option} is no option of {group}: {known}")
        whole = content(file)
        yield f"{group}.{PARTS[group]}.{name}", {**whole, **given, "_target_": whole["_target_"]}
    yield from ((f"{group}.{name}", section[name]) for name in (choice if isinstance(choice, list) else ()) if name != "none")
    if group not in LISTS:
        yield group, section


def _classes(
    sections: Mapping[str, Mapping[str, JsonObject]], trusted: Collection[str], problems: list[str]
) -> dict[str, type[Option]]:
    """The classes of the options, by the keys of their settings. Their problems are added to `problems`."""
    found = {}
    for group, of_group in sections.items():
        for prefix, section in of_group.items():
            with collecting(problems):
                found[prefix] = _class(group, prefix, str(section.get("_target_")), trusted)
    return found


def _class(group: str, prefix: str, target: str, trusted: Collection[str]) -> type[Option]:
    """The class of an option. Raises UserError. Imports only shipped or trusted code."""
    said = f"{prefix}._target_={target}"
    if target not in shipped_targets() and (wrong := list(user_code.trust_problems(said, target, trusted))):
        raise UserError(wrong)
    try:
        cls = user_code.import_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        beneath = isinstance(error, ImportError) and not target.startswith(f"{error.name}.")  # what its module imports
        raise UserError(f"{said} cannot be imported: {error}{'' if beneath else _near(target, group)}") from None
    if not isinstance(cls, type) or not issubclass(cls, Option):
        raise UserError(f"{said} is not an option of drivetrain: {_instead(group, target)}")
    if cls.effect not in get_args(Effect):
        raise UserError(f"{said} says effect={cls.effect!r}: it is one of {', '.join(get_args(Effect))}")
    if target not in shipped_targets(group) and (base := _base_of(cls)) is not _base(group):
        raise UserError(f"{said} is an option, but not one of {group}: its class derives from {base.__name__}")
    return cls


def _make(
    prefix: str,
    section: JsonObject,
    cls: type[Option] | None,
    made: Mapping[str, Option | None],
    composed: Composed,
    problems: list[str],
) -> Option | None:
    """One option as an object, or None with its `problems`. A sum gets its parts, which are already `made`."""
    if cls is None:
        return None
    below = f"{prefix}.{PARTS[prefix]}" if prefix in PARTS else prefix
    parts = {key.removeprefix(f"{below}."): part for key, part in made.items() if key.startswith(f"{below}.")}
    but = {"_target_", *(() if prefix in PARTS else parts), *(["option"] if prefix.count(".") > 1 else [])}
    values, wrong = _checked(prefix, schema.of(cls), section, but, composed)
    problems += wrong.values()
    values |= ({PARTS[prefix]: parts} if prefix in PARTS else {"parts": parts}) if parts else {}
    return None if wrong or None in parts.values() else cls(**values)


def _near(target: str, group: str) -> str:
    """The end of a message about a failed import of a class: similar names there and in drivetrain, or ""."""
    known = {name.rpartition(".")[2]: name for name in shipped_targets(group)}
    if module := sys.modules.get(target.rpartition(".")[0]):
        known |= {name: f"{module.__name__}.{name}" for name, value in vars(module).items() if isinstance(value, type)}
    near = get_close_matches(target.rpartition(".")[2], known)
    return f": did you mean {' or '.join(repr(known[name]) for name in near)}?" if near else ""


def _instead(group: str, target: str) -> str:
    """The remedy for a class that is no option: the shipped option of this name, one that takes any class, or writing one."""
    name = target.rpartition(".")[2].lower()
    known = options()[group]
    if name in known:
        return f"{group}={name} is the option that ships for it"
    if "own" in known:
        return f"to use a class of yours as it is, set {group}=own {group}.target={target}"
    base = importlib.import_module(f"drivetrain.{group}").__all__[0]  # the package's public class, not its base
    return f"write a class that derives from drivetrain.{group}.{base} and makes it: docs/extending.md shows one"


def _base_of(cls: type) -> type[Option]:
    """The base class of an option's group."""
    found: type[Option] = cls.__mro__[cls.__mro__.index(Option) - 1]
    return found


def _base(group: str) -> type[Option]:
    """The base class of a group."""
    return _base_of(user_code.import_name(min(shipped_targets(group))))


def _wrong_phases(given: JsonMapping | None, where: Where) -> dict[str, str]:
    """Dotted key → problem of each wrong setting of an update's phases."""
    wrong: dict[str, str] = {}
    for name, settings in (given or {}).items():
        key = f"phases.{name}"
        if isinstance(settings, dict) and "parameters" in settings:
            wrong |= {f"{key}.{k}": line for k, line in schema.of(phases.Phase).check(key, settings, where)[1].items()}
        else:
            wrong[key] = f"{where('phases')}{key}={settings}: give the parameters that it trains, as {{parameters: [{name}]}}"
    return wrong


def machine_local_keys(run: RunSpec) -> set[str]:
    """The dotted keys that depend on the machine or its operator: no recipe sets them, and the config's hash leaves them out."""
    always = {"output_dir", "resume", "resume_changed", "trust", "recipe", "logger", "callbacks"}
    return always | run.not_for_recipes | {f"{group}.{k}" for group, option in _by_group(run) for k in option.machine_local_keys}


def identifying_keys(run: RunSpec) -> set[str]:
    """The machine-local keys that make it another run nevertheless: the config's hash has them, and a resumed run keeps them."""
    return run.not_for_recipes | {f"{group}.{setting}" for group, option in _by_group(run) for setting in option.identifying_keys}


def read_config(path: Path) -> JsonObject:
    """A run's literal config.yaml: references are not followed, because the file is not trusted.

    Raises OSError, and ValueError unless it is a mapping of plain values of a config's size and depth.
    """
    found = read_yaml(path)
    if not isinstance(found, dict):
        raise ValueError("it is no mapping")
    try:
        OmegaConf.create([text for _, text in references(found)])
    except OmegaConfBaseException as error:
        raise ValueError(str(error)) from None
    return found
