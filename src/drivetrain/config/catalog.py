"""The existing options: shipped in conf/, of installed plugins, and of --config-dir."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml

from drivetrain.config import plugins
from drivetrain.core.errors import did_you_mean
from drivetrain.core.machine.files import MB, read_json, read_text, read_yaml
from drivetrain.core.machine.paths import conf_dir
from drivetrain.core.typed import JsonMapping, JsonObject

# groups with summable options, as loss=[a,b], and the class of the sum
SUMS = {"loss": "drivetrain.loss.sum.Sum"}
PARTS = {"data": "sources"}  # the setting with further options of the group, by the user's names
LISTS = ("surgery", "augment", "metrics", "logger")  # groups that take several options at once
EXPERIMENTS = "experiment"  # the recipe folder of a config dir, under the name of Hydra's users

MOST = MB  # of an option's file

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML's C parser, if built with one

_KEY = re.compile(r"(?P<key>\w+): (?P<default>.*\S)\s*# (?P<doc>.+)")
_TARGET = re.compile(r"^_target_: (\S+)", re.M)


@cache
def root_config() -> JsonMapping:
    """conf/config.yaml: the values that belong to no group, and the defaults."""
    return _parsed((conf_dir() / "config.yaml").read_text(encoding="utf-8"))


@cache
def root_keys() -> Mapping[str, str]:
    """Key of no group → its default and description, from conf/config.yaml."""
    lines = (conf_dir() / "config.yaml").read_text(encoding="utf-8").splitlines()
    rows = [match for line in lines if (match := _KEY.match(line))]
    return {row["key"]: f"{row['default']}, by default; {row['doc']}" for row in rows}


@cache
def default_options() -> JsonMapping:
    """Group → its default option (a list for LISTS), in the order of conf/config.yaml."""
    return {group: option for entry in root_config()["defaults"] if isinstance(entry, dict) for group, option in entry.items()}


def other_folders(config_dirs: Sequence[str] = ()) -> tuple[Path, ...]:
    """The option folders after conf/: the plugins', then the user's."""
    folders = (*(plugin.conf for plugin in plugins.plugins()), *map(Path, config_dirs))
    return tuple(dict.fromkeys(folder.resolve() for folder in folders))


def option_files(config_dirs: Sequence[str] = ()) -> Mapping[str, Mapping[str, Path]]:
    """Group → option → its file; groups in the order of conf/config.yaml, drivetrain's own options first."""
    return _option_files(other_folders(config_dirs))


@lru_cache(maxsize=16)
def _option_files(others: tuple[Path, ...]) -> Mapping[str, Mapping[str, Path]]:
    found: dict[str, dict[str, Path]] = {group: {} for group in default_options()}
    for folder in (conf_dir(), *others):
        for file in sorted(folder.glob("*/*.yaml")):
            if file.parent.name in found and not _is_shared(file):
                found[file.parent.name].setdefault(file.stem, file)
    return found


def options(config_dirs: Sequence[str] = ()) -> dict[str, list[str]]:
    """Group → the names of its options, in the order of `option_files`."""
    return {group: list(files) for group, files in option_files(config_dirs).items()}


def owners(config_dirs: Sequence[str] = ()) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """Setting → group → the options that have it; groups and options in the order of `option_files`."""
    return _owners(other_folders(config_dirs))


@lru_cache(maxsize=16)
def _owners(others: tuple[Path, ...]) -> Mapping[str, Mapping[str, Sequence[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for group, files in _option_files(others).items():
        for name, setting in ((name, str(key)) for name, file in files.items() for key in content(file) if key != "_target_"):
            found.setdefault(setting, {}).setdefault(group, []).append(name)
    return found


def option_keys(group: str, option: object, config_dirs: Sequence[str] = ()) -> set[str]:
    """The keys of an option's file, none without such an option. A sum has its options' names, and `weights`."""
    if isinstance(option, list) and group in SUMS:
        return {*map(str, option), "weights"}
    file = option_files(config_dirs).get(group, {}).get(str(option))
    return {str(key) for key in content(file)} if file is not None else set()


def still_applies(key: str, chosen: Mapping[str, object], config_dirs: Sequence[str] = ()) -> bool:
    """True if a dotted key belongs to a `chosen` option (group → option), or to a group without a choice."""
    group, _, setting = key.partition(".")
    if not setting or group not in chosen:
        return True
    option = one_or_several(group, chosen[group])
    names = {*map(str, option)} if group in LISTS else option_keys(group, option, config_dirs)
    return setting.split(".")[0] in names


def _is_shared(file: Path) -> bool:
    """True if a file holds keys shared by several options, which name it under `defaults`."""
    return file.stem.startswith("_")


@lru_cache(maxsize=512)
def _texts(file: Path) -> list[str]:
    """The texts of an option's file, and of the shared files named by `defaults`."""
    text = file.read_text(encoding="utf-8")
    named = [f"{name}.yaml" for name in _parsed(text).get("defaults", []) if name != "_self_"]
    places = [(file.parent / name, conf_dir() / file.parent.name / name) for name in named]
    shared = [own if own.is_file() else shipped for own, shipped in places if own.is_file() or shipped.is_file()]
    return [text, *(each for place in shared for each in _texts(place))]


@lru_cache(maxsize=512)
def _parsed(text: str) -> JsonMapping:
    found = yaml.load(text, _Loader)
    return found if isinstance(found, dict) else {}


def content(file: Path) -> JsonMapping:
    """The keys and values of an option's file, followed by shared keys."""
    every: JsonObject = {}
    for text in _texts(file):
        every |= {key: value for key, value in _parsed(text).items() if key not in every and key != "defaults"}
    return every


def key_lines(file: Path) -> list[str]:
    """The lines with an option's keys and comments; a key without a comment takes a shared line's."""
    found: dict[str, str] = {}
    for text in _texts(file):
        for line in text.splitlines():
            key, own = line.partition(":")[0], found.get(line.partition(":")[0])
            if own is None and not line.startswith(("#", "_target_", "defaults")):
                found[key] = line
            elif own is not None and "#" not in own and (comment := line.partition("#")[2]):
                found[key] = f"{own}  #{comment}"
    return [*found.values()]


def one_or_several(group: str, option: object) -> Any:
    """A choice in its group's form: a list for LISTS, and for SUMS with more than one."""
    if group in LISTS:
        return option if isinstance(option, list) else [] if option is None else [option]
    if group in SUMS and isinstance(option, list):
        return option[0] if len(option) == 1 else option or None
    return option


def summary(file: Path) -> str:
    """The first comment of an option's file: the option's benefit."""
    comments = (line[1:].strip() for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next((comment for comment in comments if not comment.startswith("@package")), "")


def when(file: Path) -> str:
    """The comment in an option's file on when to use it, or ""."""
    found = re.search(r"^# when: (.+)$", file.read_text(encoding="utf-8"), re.M)
    return found[1].strip() if found else ""


@cache
def measured() -> Mapping[str, str]:
    """Override → the figure of `python -m bench.cards` for that option, perhaps with a key, or the reason for none."""
    file = conf_dir() / "measured.json"
    return read_json(file) if file.exists() else {}


def described(config_dirs: Sequence[str] = ()) -> dict[str, str]:
    """The text to type for each option and setting → its name with its description."""
    found = {key: f"{key} {text}" for key, text in root_keys().items()}
    for group, files in option_files(config_dirs).items():
        for name, file in files.items():
            of = f"{group}.{name}" if group in LISTS else group
            found[f"{group}=[{name}]" if group in LISTS else f"{group}={name}"] = f"{group} {name} {summary(file)}"
            rows = (line.partition(":") for line in key_lines(file))
            found |= {f"{of}.{key}": f"{of} {key} {text.partition('#')[2]}" for key, _, text in rows}
    return found


def target(file: Path) -> str:
    """The dotted name of an option's class."""
    return str(_TARGET.findall(file.read_text(encoding="utf-8"))[0])


@cache
def shipped_targets(group: str = "*") -> frozenset[str]:
    """The dotted names of conf/'s classes, of one group or all: a config may use these without trust."""
    groups = {name: files for name, files in _option_files(()).items() if group in (name, "*")}
    of_files = (target(file) for files in groups.values() for file in files.values())
    return frozenset({*of_files, *(SUMS[name] for name in SUMS if name in groups)})


def problems(config_dirs: Sequence[str] = ()) -> list[str]:
    """The problems of the options of plugins and of the user's own folders, all of them."""
    misplaced = [problem for folder in config_dirs for problem in _misplaced(Path(folder))]
    return [*plugins.problems(), *(misplaced or _problems(other_folders(config_dirs)))]


def _misplaced(folder: Path) -> Iterator[str]:
    """The reasons why a folder does not suit --config-dir: it has no folder of a group or of experiments, and no recipe."""
    known = {*default_options(), EXPERIMENTS}

    def holds_options(place: Path) -> bool:
        return any((place / name).is_dir() for name in known)

    if (
        holds_options(folder)
        or any(folder.glob("*/*.yaml"))
        or (any(folder.glob("*.yaml")) and folder.resolve().name not in known)
    ):
        return
    below = [place for place in sorted(folder.glob("*/")) if holds_options(place)]
    place = folder.resolve().parent if folder.resolve().name in known else below[0] if below else None
    hint = f"say --config-dir {place}" if place else "an option is a file FOLDER/<group>/<option>.yaml, as optimizer/mine.yaml"
    yield f"--config-dir {folder} holds no folder of a group: {hint}"


@lru_cache(maxsize=16)
def _problems(folders: tuple[Path, ...]) -> tuple[str, ...]:
    files = _option_files(folders)
    return tuple(problem for folder in folders for file in sorted(folder.glob("*/*.yaml")) for problem in _of_file(file, files))


def _of_file(file: Path, files: Mapping[str, Mapping[str, Path]]) -> Iterator[str]:
    """The reasons why a file is no option or cannot be chosen."""
    group, text = file.parent.name, ""
    try:
        text, content = read_text(file.resolve(), MOST), read_yaml(file.resolve(), MOST)
    except (OSError, ValueError) as error:
        yield f"{file}: not valid YAML: {getattr(error, 'strerror', None) or error}"
        return
    package = f"# @package {group}.{file.stem}"
    if group == EXPERIMENTS or _is_shared(file):  # a recipe, read when it is named; or keys of several options
        return
    if group not in files:
        yield f"{file}: there is no group '{group}': {did_you_mean(group, files)}"
    elif (chosen := files[group][file.stem]) != file and chosen.read_bytes() == file.read_bytes():  # a plugin, and its checkout
        return
    elif chosen != file:
        owner = "ships with drivetrain" if chosen.is_relative_to(conf_dir()) else f"is also in {chosen}"
        yield f"{file}: {group}={file.stem} {owner}: give yours another name"
    elif not isinstance(content, dict) or not isinstance(content.get("_target_"), str):
        yield f"{file}: an option is a mapping of its keys, with _target_ as the dotted name of its class"
    elif group in LISTS and package not in text.splitlines():
        yield f"{file}: several options of {group} are chosen at once, so each needs its own key: add the line '{package}'"
