"""The contract of every option, as a check that a plugin's own tests can call:

from drivetrain.testing import contract_problems
def test_options(): assert not contract_problems("optimizer", "my_optimizer")
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence

from drivetrain.config import recipe_checks, schema
from drivetrain.config.catalog import LISTS, option_files, summary
from drivetrain.config.compose import compose
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.options import allowed, groups
from drivetrain.core.options.option import Option
from drivetrain.core.step.target_kinds import unsaid
from drivetrain.core.user.code import import_name
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS


def contract_problems(group: str, option: str, config_dirs: Sequence[str] = ()) -> list[str]:
    """The points where an option's file and class disagree: its settings are the class's arguments, with its defaults."""
    return list(_problems(group, option, config_dirs))


def _problems(group: str, option: str, config_dirs: Sequence[str]) -> Iterator[str]:
    files = option_files(config_dirs)
    if group not in files:
        yield f"there is no group '{group}': {did_you_mean(group, files)}"
        return
    if option not in files[group]:
        yield f"there is no {group}={option}: {did_you_mean(option, files[group])}"
        return
    file = files[group][option]
    if not summary(file):
        yield f"{file}: its first comment must say what {option} does for a run"
    try:
        section = compose([f"{group}=[{option}]" if group in LISTS else f"{group}={option}"], config_dirs).plain[group]
        settings = dict(section[option] if group in LISTS else section)
        cls = import_name(target := str(settings.pop("_target_")))
    except UserError as error:
        yield from error.problems
        return
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{file}: {target} cannot be imported: {error}"
        return
    if not isinstance(cls, type) or not issubclass(cls, Option):
        yield f"{file}: {target} does not derive from Option"
        return
    yield from (f"{file}: {problem}" for problem in schema.of(cls).problems(group, settings))
    missing = [name for name in schema.of(cls).hints if name not in settings]
    yield from (f"{file}: {name} is missing, which is an argument of {cls.__name__}" for name in missing)
    yield from (f"{file}: {problem}" for problem in _open_texts(group, cls))
    annotated = inspect.get_annotations(cls.__init__) if settings else {}
    yield from (f"{file}: {cls.__name__} has no annotation for {name}" for name in settings if name not in annotated)
    try:
        from_python, from_yaml = vars(cls()), vars(cls(**settings))
    except Exception as error:
        yield f"{file}: {cls.__name__} must be possible without arguments, and with the file's: {type(error).__name__}: {error}"
        return
    yield from (f"{file}: {problem}" for problem in _claim_problems(cls, settings))
    for name in settings:
        if name in from_python and not _equal(from_python[name], from_yaml[name]):
            yield f"{file}: {name} is {from_yaml[name]!r}, but the default of {cls.__name__} is {from_python[name]!r}"


def _claim_problems(cls: type[Option], settings: Collection[str]) -> Iterator[str]:
    """The gaps in an option's claim about training."""
    if cls().effect_as_set() != "exact" and not 10 < len(cls.changes) < 100:
        yield (
            f'{cls.__name__} does not say what it does to training: give it effect = "exact" (the same numbers), or "close" '
            'or "changes" with one line in changes, of 11 to 99 letters'
        )
    if issubclass(cls, groups.Metric) and not getattr(cls, "takes", ()):
        yield unsaid(cls.__name__)
    if issubclass(cls, groups.Metric) and not hasattr(cls(), "name"):
        yield f"{cls.__name__} has no name: give the class name = …, the word of its option and of its figure"
    yield from (f"{key} of {cls.__name__}.key_effects is no argument of it" for key in cls.key_effects if key not in settings)


def _open_texts(group: str, cls: type[Option]) -> Iterator[str]:
    """Each setting whose text could be anything and reach a library from a recipe."""
    if group in OPERATOR_KEYS:
        return
    for name, hint in schema.of(cls).hints.items():
        if name not in recipe_checks.local_settings(cls) and allowed.OPEN in allowed.rules(hint):
            yield (
                f"{name} of {cls.__name__} may be any text or mapping, and a recipe could hold it: say in its annotation what it "
                "may be (Literal, Name, ColumnName, …: drivetrain.core.options.allowed), or name it in machine_local_keys"
            )


def _equal(default: object, value: object) -> bool:
    """True if a default of Python equals a value of YAML, which has no tuples and may write null for an empty list."""
    if isinstance(default, list | tuple | dict | None) and isinstance(value, list | tuple | dict | None):
        return list(default or ()) == list(value or ())
    return default == value
