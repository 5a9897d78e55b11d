"""Command line + recipe + conf/ → one config. Every problem is found, not only the first."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config import recipe_values
from drivetrain.config.catalog import (
    LISTS,
    SUMS,
    content,
    default_options,
    one_or_several,
    option_files,
    options,
    other_folders,
    still_applies,
)
from drivetrain.config.catalog import problems as option_problems
from drivetrain.config.composed import Composed
from drivetrain.config.hydra_words import instead, is_hydra_override, off_switch
from drivetrain.config.keys import KeySetter, replaced
from drivetrain.config.other_tools import OF_NUMBER, TRANSFORMERS, USUAL, suggestion
from drivetrain.core.errors import LOGIN, UserError, did_you_mean
from drivetrain.core.machine.paths import conf_dir
from drivetrain.core.options.overrides import format_value, parse_each
from drivetrain.core.typed import JsonObject
from drivetrain.recipe import lookup
from drivetrain.recipe.reader import Recipe


def compose(
    overrides: Sequence[str],
    config_dirs: Sequence[str] = (),
    base: Recipe | None = None,
    changes: Mapping[str, object] | None = None,
) -> Composed:
    """Compose a config from command-line overrides.

    `base` is a recipe that was read already, such as a resumed run's. `changes` (group → option, dotted key → value) apply
    before the overrides; overrides of keys that a changed option lacks are dropped. Unknown options and keys become the
    result's `problems`, so that `validate` reports them together with wrong values. Raises UserError for a recipe that cannot
    be read and for options from outside that are wrong.
    """
    known = options(config_dirs)
    problems: list[str] = []
    notices: list[str] = []
    given = _parse(overrides, known, problems)
    all_parsed, by_operator = not problems, frozenset(given).intersection(known)
    if changes is not None:
        chosen = {key: option for key, option in changes.items() if key in known}
        given = {**{k: v for k, v in given.items() if still_applies(k, chosen, config_dirs)}, **changes}
    name = given.pop("recipe", None)
    chosen = {key: value for key, value in given.items() if key in known}
    choices = _Choices(known, problems)
    recipe, wrong = base, option_problems(config_dirs)
    try:
        recipe = lookup.read(str(name)) if name is not None and base is None and not wrong else base
    except UserError as error:
        wrong = error.problems
    if wrong:  # no values can be composed then, but options are checked
        for group, option in chosen.items():
            choices.choose(group, option)
        raise UserError([*wrong, *problems])
    values: JsonObject = {}
    if recipe is not None:
        recipe = recipe_values.for_task(recipe, chosen.get("task"), notices)
        values = _of_recipe(recipe, choices)
        notices += recipe_values.drop_those_of_other_options(recipe, values, chosen, given, config_dirs)
    for group, option in chosen.items():
        choices.choose(group, option)
    values |= {key: value for key, value in given.items() if key not in known}
    values = {key: value for key, value in values.items() if key in given or not replaced(key, given)}
    failed = {*chosen, *(recipe.choices if recipe is not None else ())}.intersection(known) - set(choices.made)

    config, all_choices, default_choices = _with_preset(choices, config_dirs)
    composed = Composed(
        dict(config), all_choices, list(overrides), recipe, notices, tuple(config_dirs), config, default_choices, problems,
        recipe_keys=set(values) - set(given), by_operator=by_operator,
    )  # fmt: skip
    composed.doubtful = {*failed} if all_parsed else {*failed, "an override"}
    setter = KeySetter(composed.unresolved, composed.choices, config_dirs)
    for key, value in values.items():
        if LOGIN.search(str(value)) and "${" not in str(value):
            problems.append(
                f"{composed.where(key)}{key}={value}: an address with a login in it would stay in the run's files: name it "
                "without, or by a variable of the environment, as ${oc.env:ADDRESS}"
            )
        if key.split(".")[0] in failed:
            problem = setter.unknown_in_group(key, value)
        else:
            problem = setter.set(key, value, of_mapping=key in composed.recipe_keys)
        if problem is not None and recipe is not None and recipe.header.schema and key in recipe.unchanged and key not in given:
            notices.append(
                f"{recipe.where(key)}: {key}={value} cannot be set any more. It was a mere default when {recipe.header.writer} "
                "wrote the recipe, and the run ignores it"
            )
        elif problem is not None:
            problems.append(composed.where(key) + problem)
            composed.doubtful.add(key.split(".")[0])
    if recipe is not None and (wrong := list(recipe_values.problems(recipe, values, composed.unresolved))):
        raise UserError([*problems, *wrong])
    try:
        composed.plain  # noqa: B018 - resolves every interpolation
    except OmegaConfBaseException as error:
        raise UserError([*problems, *(_unresolved(composed) or [f"a reference in the config: {_first_line(error)}"])]) from None
    return composed


def _unresolved(composed: Composed) -> list[str]:
    """The reasons why values cannot be resolved, one line for each key."""
    problems, config = [], OmegaConf.create(composed.unresolved)
    for key, text in composed.references.items():
        try:
            OmegaConf.select(config, key, throw_on_missing=True)
        except OmegaConfBaseException as error:
            missing = re.search(r"Environment variable '(\w+)' not found", str(error))
            hint = f"the environment has no {missing[1]}: set it, or write ${{oc.env:{missing[1]},VALUE}}" if missing else ""
            problems.append(f"{composed.where(key)}{key}={text}: {hint or _first_line(error)}")
    return problems


def _first_line(error: Exception) -> str:
    return f"it cannot be resolved: {str(error).splitlines()[0]}"


def _parse(overrides: Sequence[str], known: Container[str], problems: list[str]) -> JsonObject:
    """Key → value of each override."""
    parsed = {}
    for text, override in parse_each(overrides, "key=value or group=option", problems):
        key = override.key_or_group
        if override.is_delete():
            hint = f"choose an option, as {key}=NAME" if key in known else f"leave it out, or set a value, as {key}=…"
            group, _, name = key.partition(".")
            if name in options().get(group, ()) and group not in LISTS:  # ~clip.norm
                hint = f"{key.replace('.', '=')} is an option: to switch the group off, say {off_switch(group, options())}"
            problems.append(f"'{text}': {key} is part of every config and cannot be deleted: {hint}")
        elif "interval(" in text and override.is_sweep_override():
            problems.append(f"'{text}' is a range to search: say -m hydra/sweeper=optuna before it, or give one value")
        elif override.is_sweep_override():
            listed = f"{key}=[{text.partition('=')[2]}]"
            as_list = f"write them as a list, {listed}, or say" if key in (*LISTS, *SUMS) else "say"
            other = "" if key in (*LISTS, *SUMS) else f", quote it, or write a list as {listed}"
            problems.append(f"'{text}' gives several values: {as_list} -m before it to run them all as a sweep{other}")
        elif is_hydra_override(text):
            problems.append(instead(text))
        elif override.package is not None:
            hint = f"write {key}={format_value(override.value())}"
            problems.append(f"'{text}': a group cannot be put elsewhere in the config: {hint}")
        else:
            parsed[key] = override.value()
    return parsed


OF_FILES = {
    (".csv", ".tsv", ".parquet", ".xlsx", ".arrow", ".feather", ".csv.gz"): "data=tabular data.path",
    (".jsonl", ".json", ".ndjson", ".jsonl.gz"): "data=jsonl data.path", (".txt", ".md"): "data=text data.path",
    (".tar",): "data=webdataset data.train",
}  # fmt: skip


@dataclass
class _Choices:
    """The options that are chosen, group by group."""

    known: dict[str, list[str]]
    problems: list[str]
    made: JsonObject = field(default_factory=dict)

    def choose(self, group: str, option: object, recipe: Recipe | None = None) -> None:
        """Choose an option (None: none; several for LISTS). Impossible choices are added to `problems`."""
        where = f"{recipe.where(group)}: " if recipe is not None else ""
        if group not in self.known:
            self.problems.append(f"{where}there is no group '{group}': {did_you_mean(group, self.known)}")
            return
        known = self.known[group]
        option = one_or_several(group, option)
        if isinstance(option, list) and group not in (*LISTS, *SUMS):
            self.problems.append(f"{where}{group}={option}: give one option, not a list: {did_you_mean('', known)}")
            return
        if option is None:
            option = "none"
        names = [_as_typed(name) for name in (option if isinstance(option, list) else [option])]
        wrong = [name for name in names if name not in known]
        for name in wrong:
            hint = _instead_of(group, name, known, by_operator=recipe is None)
            if recipe is not None:
                hint += " (an option of a plugin needs its package installed, one of a folder needs --config-dir FOLDER)"
            self.problems.append(f"{where}{group}={name} is no option of {group}: {hint}")
        if len(set(names)) < len(names):
            self.problems.append(f"{where}{group}={option} names an option twice")
        elif not wrong:
            self.made[group] = names if isinstance(option, list) else names[0]


def _as_typed(name: object) -> str:
    """An option's name as typed: true, where Hydra has read True."""
    return format_value(name) if name is None or isinstance(name, bool) else str(name)


def _instead_of(group: str, name: str, known: Sequence[str], by_operator: bool) -> str:
    """The option to write instead of an unknown one."""
    name = name.replace(".py:", ".")  # a class in a file
    known = [each for each in known if each != "none"] if group in LISTS else known  # [] is usual
    if name.lower() in known:  # SGD
        return f"did you mean '{name.lower()}'?"
    if group in OF_NUMBER and re.fullmatch(r"[\d.]+(e-?\d+)?", name):
        return f"use {OF_NUMBER[group]}={name}"
    if group == "data" and by_operator and (place := _place(name)) is not None:
        return f"use {place}"
    hint, hints = suggestion(f"{group}={name}", name, known), []
    if name in ("true", "false") and (off := off_switch(group, {group: known})):
        usual = f"{group}={USUAL[group]}" if group in USUAL else f"one of {', '.join(known)}"
        return f"say {usual}" if name == "true" else f"say {off}"
    package, _, last = name.rpartition(".")
    if group == "model" and re.search(TRANSFORMERS, name.lower()):
        hints.append(f"for a model of transformers: model=transformers model.name={name}")
    elif group == "data" and hint.startswith(("did", "there")) and name.isidentifier():
        hints.append("for a set of Hugging Face's: save_to_disk(FOLDER), and data=huggingface data.root=FOLDER")
    elif "timm" in known and hint == did_you_mean(name, known) and not get_close_matches(name, known, cutoff=0.85):
        hints.append(f"for a timm {group}: {group}=timm {group}.name={name}")
    if package and "own" in known and by_operator:
        hints.append(f"a class of your own is {group}=own {group}.target={name} 'trust=[{package.partition('.')[0]}]'")
    elif package and not hint.startswith("use "):  # a class, such as torch.optim.Adam
        hint = did_you_mean(last.lower(), known)
    elif hint.startswith("there is") and "own" in known and by_operator:
        hints.append(f"for a class of your own: {group}=own ({_OWN})")
    return "; ".join([*hints, hint])


_OWN = "docs/extending.md"


def _place(name: str) -> str | None:
    """The data option for a file or folder, with its setting; None where the name is neither."""
    if "://" in name:
        return "a folder or file of this machine: remote data must be copied or mounted first"
    if Path(name).is_dir():
        return f"data=imagefolder data.root={name} (a folder of images, with a folder for each class)"
    return next((f"{option}={name}" for suffixes, option in OF_FILES.items() if name.lower().endswith(suffixes)), None)


def _of_recipe(recipe: Recipe, choices: _Choices) -> JsonObject:
    """Choose the recipe's options; its values."""
    for group, option in recipe.choices.items():
        choices.choose(group, option, recipe)
    values = {}
    for key, value in recipe.values.items():
        if key in choices.known:
            option = default_options()[key] if value is None else value
            hint = f"choose its option under defaults, as '- override /{key}: {option}'"
            hint += ", or leave the empty line out" if value is None else ""
            choices.problems.append(f"{recipe.where(key)}: {key} is a group: {hint}")
        else:
            values[key] = value
    return values


def _with_preset(choices: _Choices, config_dirs: Sequence[str]) -> tuple[JsonObject, JsonObject, JsonObject]:
    """The read-only config of these options and the task's further settings; all options; the defaults.

    The task's values for a group apply only if the group has the option that the task names.
    """
    task = str(choices.made.get("task", default_options()["task"]))
    preset: JsonObject = content(option_files(config_dirs)["task"][task]).get("preset") or {}
    defaults = {**default_options(), **{key: option for key, option in preset.items() if key in choices.known}}
    every = {**defaults, **choices.made}
    config = dict(_by_hydra({g: option for g, option in every.items() if option != default_options()[g]}, config_dirs))
    config["task"] = {key: value for key, value in config["task"].items() if key != "preset"}
    setter = KeySetter(config, every, config_dirs)
    for key, value in preset.items():
        same = key not in choices.known and every.get(group := key.split(".")[0]) == defaults.get(group)
        if same and (problem := setter.set(key, value)) is not None:
            choices.problems.append(f"task={task} has a wrong setting: {problem}")
    return config, every, defaults


def _by_hydra(choices: JsonObject, config_dirs: Sequence[str]) -> JsonObject:
    """conf/config.yaml with these options, composed by Hydra, read-only."""
    overrides, sums = list[str](), JsonObject()
    for group, option in choices.items():
        if not isinstance(option, list):
            overrides.append(f"{group}={option}")
        elif group not in SUMS:
            overrides.append(f"{group}=[{','.join(option)}]")
        else:  # each option below its own name
            overrides += [f"~{group}", *(f"+{group}@{group}.{name}={name}" for name in option)]
            sums[group] = {"_target_": SUMS[group], "weights": None}
    config = _hydra_compose(tuple(overrides), other_folders(config_dirs))
    return config | {group: config[group] | own for group, own in sums.items()}


@lru_cache(maxsize=16)  # the jobs of a sweep differ in values more often than in options
def _hydra_compose(overrides: tuple[str, ...], folders: tuple[Path, ...]) -> JsonObject:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    from drivetrain.core.options.hydra_parts import VERSION_BASE, GlobalHydra

    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders)}]"] if folders else []
    before, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # the state of a script with @hydra.main
    try:
        with initialize_config_dir(str(conf_dir()), **VERSION_BASE):
            composed = hydra_compose("config", overrides=[*overrides, *search])
    except HydraException as error:
        raise UserError(f"the config cannot be composed: {str(error).splitlines()[0]}") from None
    finally:
        GlobalHydra.instance().hydra = before
    return OmegaConf.to_container(composed)  # type: ignore[return-value]
