"""The composed recipe of a run, in the terminal: a line for each group, with explicit settings marked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, get_args

from drivetrain.core.options.option import Effect
from drivetrain.ui import output
from drivetrain.ui.sheet import setting
from drivetrain.ui.terminal import is_live

if TYPE_CHECKING:
    from drivetrain.config.composed import Composed
    from drivetrain.core.options.option import RunSpec

OFF = ("none", "single", "constant", "")


class GroupLine(NamedTuple):
    """The line of a group. `set` is True for values from an override or the recipe, False for defaults."""

    group: str
    option: str
    option_set: bool
    settings: list[tuple[str, bool]]  # ("lr=0.01", set); explicit settings come first


def show_recipe(composed: Composed, run: RunSpec) -> None:
    """Show the composed recipe, a line for each group with its effect on training, as `drivetrain list` explains it."""
    name = composed.recipe.name if composed.recipe else "default"
    found = lines(composed)
    if not is_live():
        output.echo(f"recipe {name}: " + " ".join(f"{line.group}={setting(composed.choices[line.group])}" for line in found))
        for stage in _stages(run):
            output.echo(stage)
        return
    from rich.text import Text
    from rich.tree import Tree

    console, tree = output.console(), Tree(Text(f"recipe {name}", "bold"))
    for line in found:
        text = Text(f"{line.group:<14}", no_wrap=True, overflow="ellipsis")
        style = "yellow" if line.option_set else "dim" if line.option in OFF else "cyan"
        text.append(f"{line.option + '*' * line.option_set:<15} ", style)
        text.append(f"{effect(run, line.group):<8}", "dim")
        for words, was_set in line.settings:
            text.append(f" {words}{'*' * was_set}", "yellow" if was_set else "dim")
        tree.add(text)
    marked = any(line.option_set or (line.settings and line.settings[0][1]) for line in found)
    for key in ("epochs", "updates"):
        if composed.plain[key] is not None:
            was_set = composed.plain[key] != composed.option_defaults.get(key)
            marked = marked or was_set
            tree.add(Text(f"{key:<14}").append(f"{composed.plain[key]}{'*' * was_set}", "yellow" if was_set else "cyan"))
    for stage in _stages(run):
        tree.add(Text(stage, "yellow"))
    console.print(tree)
    if marked:
        console.print(Text("* set by an override or the recipe, not by default", "dim"))


def _stages(run: RunSpec) -> list[str]:
    """A line for each stage of the run."""
    return [f"stage {number:<8}{stage.title}" for number, stage in enumerate(run.stages, 1)]


def lines(composed: Composed) -> list[GroupLine]:
    """The line of each group."""
    return [_line(composed, group, choice) for group, choice in composed.choices.items()]


def _line(composed: Composed, group: str, choice: str | list[str]) -> GroupLine:
    option_set = choice != composed.default_choices.get(group)
    if isinstance(choice, list):
        return GroupLine(group, ", ".join(choice) or "none", option_set, [])
    default = composed.option_defaults.get(group) or {}
    settings = [
        (f"{key}={setting(value, 'null')}", value != default.get(key))
        for key, value in (composed.plain.get(group) or {}).items()
        if key != "_target_" and (value not in (None, {}) or value != default.get(key))
    ]
    return GroupLine(group, choice, option_set, sorted(settings, key=lambda each: not each[1]))


def effect(run: RunSpec, group: str) -> str:
    """The claimed effect of a group's options with their settings: exact, close or changes; the greatest of several."""
    made = run.parts.get(group)
    claims = [option.effect_as_set() for option in (made if isinstance(made, list) else [made] if made is not None else [])]
    return max(claims, key=get_args(Effect).index, default="exact")
