"""A config that a user's own program composed, such as a script with @hydra.main, as overrides of drivetrain's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import LISTS, content, option_files, options
from drivetrain.config.keys import OPEN
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.overrides import format_value


def overrides_of(config: Mapping[str, object] | DictConfig, config_dirs: Sequence[str] = ()) -> list[str]:
    """The overrides that make this config.

    A group is the name of an option (`optimizer: sgd`), or a section that Hydra composed from drivetrain's conf/, whose
    `_target_` says which option it is, or keys of the option that runs anyway. References are resolved, but those to the
    environment stay as they are, so that no secret is written. Raises UserError with every problem.
    """
    plain = _resolved(config if isinstance(config, DictConfig) else OmegaConf.create(dict(config)))
    groups = options(config_dirs)
    words: list[str] = []
    problems: list[str] = []
    for key, value in plain.items():
        if key == "hydra":  # what `--cfg all` shows beside the run's own config
            continue
        if key not in groups:
            words += _values(key, value)
            continue
        try:
            words += _group(key, value, config_dirs)
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return words


def _resolved(config: DictConfig) -> dict[str, object]:
    """The config as plain dicts and lists. Raises UserError."""
    from omegaconf.resolvers import oc

    try:
        OmegaConf.register_new_resolver("oc.env", _keep, replace=True)
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"the config cannot be resolved: {str(error).splitlines()[0]}") from None
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _keep(name: str, *default: object) -> str:
    """Stands in for the resolver oc.env: the reference itself."""
    return f"${{oc.env:{','.join([name, *map(str, default)])}}}"


def _group(group: str, value: object, config_dirs: Sequence[str]) -> Iterator[str]:
    """The overrides of one group. Raises UserError."""
    if not isinstance(value, Mapping):
        yield f"{group}={format_value(value)}"
    elif group in LISTS:
        sections = {name: section for name, section in value.items() if name != "_target_"}
        yield f"{group}={format_value([*sections])}"
        for name, section in sections.items():
            yield from _settings(group, f"{group}.{name}", name, section or {}, config_dirs)
    elif "_target_" in value:
        option = _option_of(group, value, config_dirs)
        yield f"{group}={option}"
        yield from _settings(group, group, option, value, config_dirs)
    else:
        yield from _values(group, value)


def _option_of(group: str, section: Mapping[str, object], config_dirs: Sequence[str]) -> str:
    """The option that a section was composed from: of those with its class, the one that most of its values agree with."""
    sections = {name: _section(group, name, config_dirs) for name in options(config_dirs)[group]}
    same = [name for name, known in sections.items() if known.get("_target_") == section["_target_"]]
    if not same:
        hint = did_you_mean(str(section["_target_"]).rpartition(".")[2].lower(), sections)
        raise UserError(
            f"{group}._target_={section['_target_']} is the class of no option of {group}: name one as {group}: NAME ({hint}), "
            "or add your own by config_dirs"
        )
    return max(same, key=lambda name: sum(section.get(setting) == value for setting, value in sections[name].items()))


def _section(group: str, option: str, config_dirs: Sequence[str]) -> dict[str, object]:
    """The content of an option's file; none where there is no such option."""
    file = option_files(config_dirs)[group].get(option)
    return dict(content(file)) if file is not None else {}


def _settings(group: str, place: str, option: str, section: Mapping[str, object], config_dirs: Sequence[str]) -> Iterator[str]:
    """The settings that differ from those of the option's file."""
    known = _section(group, option, config_dirs)
    for setting, value in section.items():
        if setting != "_target_" and (setting not in known or known[setting] != value):
            yield from _values(f"{place}.{setting}", value)


def _values(key: str, value: object) -> Iterator[str]:
    """A value, or each value of a mapping, as overrides; a mapping whose keys are the user's stays whole."""
    if isinstance(value, Mapping) and value and key.rpartition(".")[2] not in OPEN:
        for name, inner in value.items():
            yield from _values(f"{key}.{name}", inner)
    else:
        yield f"{key}={format_value(value)}"
