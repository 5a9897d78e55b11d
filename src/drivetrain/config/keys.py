"""Sets one key of a composed config, or gives the reason why it cannot be set."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import LISTS, SUMS, default_options, described, options, owners, root_config
from drivetrain.config.other_tools import ELSEWHERE, TYPED, by_description, here, is_known, suggestion
from drivetrain.core.errors import did_you_mean, near_names
from drivetrain.core.typed import JsonObject

# Mappings whose keys are the user's: arguments of a class, values of an architecture, patterns of parameters' names.
OPEN = {"config", "kwargs", "lr_multipliers", "unfreeze"}


def replaced(key: str, given: Container[str]) -> bool:
    """True if a setting of a key's whole mapping replaces the key's value. To an open mapping entries are added instead."""
    parts = key.split(".")
    inside = (parts[:depth] for depth in range(2, len(parts)))
    return any(".".join(each) in given for each in inside if each[-1] not in OPEN)


def as_setting(flag: str, value: str | None = None) -> str | None:
    """The setting to type for a flag such as --batch-size or --lr=0.1; None for an unknown flag.

    `value` is the word after the flag, which may be its value.
    """
    name, _, own = flag.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), own or value or "…"
    default, table = default_options(), owners()
    homes = [g for g, having in table.get(name, {}).items() if g not in LISTS and default[g] in having]
    named = [f"{g}.{name[len(g) + 1 :]}" for g in default if name[len(g) :][:1] in ("_", ".") and name.startswith(g)]  # data_root
    for each in (key for key in named if key.partition(".")[0] in table.get(key.partition(".")[2], {})):
        return f"{each}={value}"
    present = f"{homes[0]}.{name}" if len(homes) == 1 else here(name) or name
    if present == name and name not in {*default, *root_config()}:
        return None
    group, _, setting = present.rpartition(".")
    with_it = table.get(setting, {}).get(group, ())
    needed = f"{group}={with_it[0]} " if with_it and group not in LISTS and default[group] not in with_it else ""
    return present if "=" in present else f"{needed}{present}={value}"


def _merged(current: object, value: object) -> Any:
    """The replacement of a current value: a mapping is added to a mapping. Raises OmegaConfBaseException."""
    if not isinstance(current, dict) and "{" not in str(value):  # neither a mapping nor a reference
        return value
    node = OmegaConf.create({"value": current})
    OmegaConf.update(node, "value", value)
    return dict(OmegaConf.to_container(node))["value"]  # type: ignore[arg-type]


def every_name(config_dirs: Sequence[str] = ()) -> dict[str, str]:
    """The text to type for each name of any group: an option, an option's setting, or another tool's name."""
    known = options(config_dirs)
    found = {name.rpartition(".")[2].rpartition("=")[2]: mend for name, mend in ELSEWHERE.items()}
    found |= {name: f"{group}=[{name}]" if group in LISTS else f"{group}={name}" for group in known for name in known[group]}
    for setting, having in owners(config_dirs).items():
        first, names = next(iter(having.items()))
        found[setting] = f"{first}.{names[0]}.{setting}" if first in LISTS else f"{first}.{setting}"
    return found | {name: name for name in (*root_config(), *known)}


@dataclass
class KeySetter:
    """A composed config whose keys are set one by one. Mappings in it are replaced, not changed: others may share them."""

    config: JsonObject
    choices: JsonObject  # group → option
    config_dirs: Sequence[str] = ()
    made: set[str] = field(default_factory=set)  # keys of values that mappings replaced

    def set(self, key: str, value: object, of_mapping: bool = False) -> str | None:
        """Set an existing key; keys below an open mapping may be new.

        Returns the problem if it cannot be set. A key below null turns null into a mapping; with `of_mapping` it replaces
        another value too.
        """
        parts = key.split(".")
        if "_target_" in parts:
            return f"{key}: a target cannot be set: give your own class by model=own model.target=…, or an option by --config-dir"
        mapping, last = self.config, parts[-1]
        for depth, part in enumerate(parts):
            opened = OPEN.intersection(parts[:depth]) or any(key.startswith(f"{made}.") for made in self.made)
            if part not in mapping and not opened:
                return self._unknown(parts, value, depth, [str(name) for name in mapping if name != "_target_"])
            if depth < len(parts) - 1:
                inside, below = ".".join(parts[: depth + 1]), mapping.get(part)
                if not isinstance(below, dict):
                    if below is not None and not of_mapping:
                        hint = f": {self._of_section(parts, [*mapping])}" if not depth else ""
                        return f"{key}={value}: {inside} is a value and has no '{parts[depth + 1]}'{hint}"
                    self.made.add(inside)
                    below = {}
                mapping[part] = mapping = dict(below)
        current = mapping.get(last)
        if isinstance(current, dict) and current and not isinstance(value, dict):
            return f"{key}={value}: {key} is a mapping of {', '.join(map(str, current))}: set one of those"
        if isinstance(value, str) and isinstance(current, list) and all(isinstance(each, str) for each in current):
            value = [value]  # trust=my_pkg, model.freeze=backbone
        try:  # {} replaces a default's entries; other mappings are added to them
            mapping[last] = _merged({} if value == {} and last in OPEN else current, value)
        except OmegaConfBaseException as error:  # a mapping for a list, or ${ without its }
            return f"{key}={value}: it cannot be set like this: {str(error).splitlines()[0]}"
        return None

    def _unknown(self, parts: Sequence[str], value: object, depth: int, names: Sequence[str]) -> str:
        """The problem of a key with an unknown part at `depth`; `names` are the known ones."""
        key, part, inside, rest = ".".join(parts), parts[depth], ".".join(parts[:depth]), ".".join(parts[1:])
        group, known = parts[0], options(self.config_dirs)
        if group in LISTS and not depth and len(parts) == 2:  # augment.mixup_alpha
            of = [(name, rest.removeprefix(f"{name}_")) for name in known[group] if rest.startswith(f"{name}_")]
            written = [f"{group}=[{name}] {group}.{name}.{setting}={value}" for name, setting in of]
            return f"{key}={value}: {group} has no such option: " + (
                f"use {written[0]}" if of else did_you_mean(rest, known[group])
            )
        if group in LISTS and depth < 2 < len(parts):  # a setting of an option that was not chosen
            option = parts[1]
            hint = f"set {group}=[{option}] too" if option in known[group] else did_you_mean(option, known[group])
            return f"{key}={value}: {option} is not among the options of {group}: {hint}"
        place = f"{inside}={self.choices[inside]}" if inside in known else inside or "the config"
        if group in SUMS and isinstance(self.choices[group], list):
            chosen = self.choices[group]
            place = f"{inside} of {group}=[{','.join(chosen)}]"
            having = [f"{group}.{name}.{part}" for name in chosen if name in self._having(group, part)]
            hint = f"set {' or '.join(having)}" if depth == 1 and having else did_you_mean(part, names)
        elif rest and not depth:
            hint = self._of_section(parts, names)
        else:
            of_rest = next((end for end in parts[depth + 1 :] if is_known(end)), "") if here(f"{inside}.{part}") is None else ""
            hint = self._hint("" if of_rest else inside, of_rest or part, names)
        if (group := hint.removeprefix("use ")) in known and (near := near_names(str(value), known[group])):
            hint += f"={near[0]}"
        if inside in known and hint == did_you_mean(part, ()):
            settings = self._settings(inside)
            return f"{key}={value}: {place} has no settings" + (f": {did_you_mean(part, settings)}" if settings else "")
        return f"{place} has no '{part}' ({key}={value}): {hint}"

    def _hint(self, inside: str, part: str, names: Sequence[str]) -> str:
        """The remedy for a part of a key that is not among `names`: similar ones, and the options that have it."""
        known = options(self.config_dirs)
        given = f"{inside}.{part}" if inside else part
        present = here(given) or given
        homes = [] if inside or present != given else [part] if part in names else self._homes(part)
        everything = dict[str, str] if inside else lambda: every_name(self.config_dirs)
        own = inside in known and self._having(inside, part) and here(given) is None  # of another option of the group
        hint = did_you_mean(part, names) if own else suggestion(given, part, names if inside else {*names, *known}, everything)
        hint = f"did you mean {' or '.join(map(repr, homes))}?" if homes else hint
        group, _, setting = (homes[0] if len(homes) == 1 else present).rpartition(".")
        having = self._having(group, setting)
        if having and (group in LISTS or self.choices[group] not in having):
            of = [f"{group}.{name}.{setting}" if group in LISTS else f"{group}={name}" for name in having]
            has_it = f"write {' or '.join(of)}" if group in LISTS else f"{' or '.join(of)} has it"
            return has_it if present == given and not homes else f"{hint} (with {group}={', '.join(having)})"
        if inside in known and inside not in LISTS and hint.startswith(("there is", "it has none")):
            for near in near_names(part, self._settings(inside))[:1]:
                has_it = " or ".join(f"{inside}={name}" for name in self._having(inside, near))
                return f"did you mean '{inside}.{near}'? {has_it} has it"
        if not inside and hint.startswith("there is") and (found := by_description(part, described(self.config_dirs))):
            return f"did you mean {' or '.join(found)}?"
        return hint

    def _of_section(self, parts: Sequence[str], names: Sequence[str]) -> str:
        """The remedy for a key that begins with another tool's section, or with a misspelt group."""
        known = options(self.config_dirs)
        for group in near_names(parts[0], known, TYPED)[:1]:
            if self._having(group, setting := ".".join(parts[1:]).lower()):
                return f"did you mean '{group}.{setting}'?"
        ends = [sign.join(parts[n:]) for n in range(len(parts)) for sign in "_."]
        told = (end for end in ends if is_known(end) or end in names or end in known or self._homes(end))
        return self._hint("", next(told, "_".join(parts)), names)

    def _having(self, group: str, setting: str) -> Sequence[str]:
        """The options of a group that have a setting."""
        return owners(self.config_dirs).get(setting, {}).get(group, ())

    def _settings(self, group: str) -> list[str]:
        """The settings of a group's options."""
        return [setting for setting, having in owners(self.config_dirs).items() if group in having]

    def _homes(self, setting: str) -> list[str]:
        """The keys of this setting in all groups, chosen options first."""
        groups = [group for group in owners(self.config_dirs).get(setting, {}) if group not in LISTS]
        if not groups and (of_part := self._of_part(*setting.partition("_")[::2])):
            return [of_part]
        first = sorted(groups, key=lambda group: self.choices[group] not in self._having(group, setting))
        return [f"{group}.{setting}" for group in first]

    def _of_part(self, head: str, rest: str) -> str:
        """The setting meant by a name of two parts (ema_decay, clip_norm, swa_start, mixup_alpha), or ""."""
        known = options(self.config_dirs)
        for group, names in known.items() if rest else ():
            near = near_names(rest, self._settings(group))[:1] if head == group or head in names else []
            if head == group and near and group not in LISTS:
                return f"{group}.{near[0]}"
            if head in names and group in LISTS:
                return f"{group}=[{head}]" + "".join(f" {group}.{head}.{setting}" for setting in near)
            if head in names and near:
                return f"{group}={head} {group}.{near[0]}"
        return ""

    def unknown_in_group(self, key: str, value: object) -> str | None:
        """The problem of a setting that no option of its group has, where the option's name is wrong too."""
        group, setting, *_ = key.split(".")
        names = options(self.config_dirs)[group] if group in LISTS else self._settings(group)
        if setting in names:
            return None
        return f"no option of {group} has '{setting}' ({key}={value}): {suggestion(f'{group}.{setting}', setting, names)}"
