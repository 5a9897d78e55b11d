"""Setting one key of a composed config, or the reason why it cannot be set."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from drivetrain.config.catalog import LISTS, SUMS, default_options, options, owners, root_config
from drivetrain.config.elsewhere import ELSEWHERE, SECTIONS, suggestion
from drivetrain.core.errors import did_you_mean

# Mappings whose keys are the user's: arguments of a class, values of an architecture, patterns of parameters' names.
OPEN = {"config", "kwargs", "lr_multipliers", "unfreeze"}


def replaced(key: str, given: Container[str]) -> bool:
    """True if a setting of the whole mapping that a key is in takes its place: to an open mapping entries are added."""
    parts = key.split(".")
    inside = (parts[:depth] for depth in range(2, len(parts)))
    return any(".".join(each) in given for each in inside if each[-1] not in OPEN)


def as_setting(flag: str, value: str | None = None) -> str | None:
    """The setting that a flag such as --batch-size or --lr=0.1 stands for, as it is typed here; None where it is none.

    `value` is the word after the flag, which may be its value.
    """
    name, _, own = flag.lstrip("-").partition("=")
    name, value = name.replace("-", "_"), own or value or "…"
    default = default_options()
    having = owners()
    homes = [group for group, option in default.items() if group not in LISTS and option in having[group].get(name, ())]
    present = f"{homes[0]}.{name}" if len(homes) == 1 else ELSEWHERE.get(name, name)
    if present == name and name not in {*default, *root_config()}:
        return None
    group, _, setting = present.rpartition(".")
    with_it = having.get(group, {}).get(setting, ())
    needed = f"{group}={with_it[0]} " if with_it and group not in LISTS and default[group] not in with_it else ""
    return present if "=" in present else f"{needed}{present}={value}"


@dataclass
class KeySetter:
    """A composed config whose keys are set one by one."""

    config: DictConfig
    choices: dict[str, Any]  # group → option
    config_dirs: Sequence[str] = ()
    made: set[str] = field(default_factory=set)  # keys of values that mappings took the place of

    def set(self, key: str, value: object, of_mapping: bool = False) -> str | None:
        """Set a key that exists; keys below an open mapping may be new. Returns the problem if it cannot be set.

        A key below null makes a mapping of it. With `of_mapping` it also does so of another value.
        """
        parts = key.split(".")
        if "_target_" in parts:
            return f"{key}: a target cannot be set: give your own class by model=own model.target=…, or an option by --config-dir"
        node: Any = self.config
        for depth, part in enumerate(parts):
            if node is None or (of_mapping and not isinstance(node, DictConfig)):
                self.made.add(".".join(parts[:depth]))
                OmegaConf.update(self.config, ".".join(parts[:depth]), {}, force_add=True)
                break
            if not isinstance(node, DictConfig):
                return f"{key}={value}: {'.'.join(parts[:depth])} is a value and has no '{part}'"
            if part not in node:
                if OPEN.intersection(parts[:depth]) or any(key.startswith(f"{made}.") for made in self.made):
                    break
                return self._unknown(parts, value, depth, [str(name) for name in node if name != "_target_"])
            if depth < len(parts) - 1:
                node = node[part]
        current = OmegaConf.select(self.config, key)
        if isinstance(current, DictConfig) and current and not isinstance(value, dict):
            return f"{key}={value}: {key} is a mapping of {', '.join(map(str, current))}: set one of those"
        if isinstance(value, str) and isinstance(current, ListConfig) and all(isinstance(each, str) for each in current):
            value = [value]  # trust=my_pkg, model.freeze=backbone
        try:
            emptied = value == {} and parts[-1] in OPEN  # {} takes the place of a default's entries; others are added to them
            OmegaConf.update(self.config, key, value, force_add=True, merge=not emptied)
        except OmegaConfBaseException as error:  # a mapping for a list, or ${ without its }
            return f"{key}={value}: it cannot be set so: {str(error).splitlines()[0]}"
        return None

    def _unknown(self, parts: list[str], value: object, depth: int, names: list[str]) -> str:
        """The problem of a key whose part at `depth` is not among the `names` there."""
        key, part, inside = ".".join(parts), parts[depth], ".".join(parts[:depth])
        known = options(self.config_dirs)
        if parts[0] in LISTS and depth < 2 < len(parts):  # a setting of an option that was not chosen
            group, option = parts[:2]
            hint = f"set {group}=[{option}] too" if option in known[group] else did_you_mean(option, known[group])
            return f"{key}={value}: {option} is not among the options of {group}: {hint}"
        if parts[0] in SUMS and isinstance(self.choices[parts[0]], list):
            return self._unknown_in_sum(parts, value, depth, names)
        if part in SECTIONS and not depth and len(parts) > 1:
            rest = ".".join(parts[1:])
            homes = [rest] if rest in names else [f"{group}.{rest}" for group in self._groups_with(rest)]
            hint = f"did you mean {' or '.join(map(repr, homes))}?" if homes else suggestion(rest, rest, {*names, *known})
            hint = hint if key not in ELSEWHERE else suggestion(key, part, names)
            return f"the config has no '{part}' ({key}={value}): {hint}"
        given = f"{inside}.{part}" if inside else part
        present = ELSEWHERE.get(given, given)
        homes = [f"{group}.{part}" for group in self._groups_with(part)] if not depth and present == given else []
        hint = f"did you mean {' or '.join(map(repr, homes))}?" if homes else ""
        hint = hint or suggestion(given, part, {*names, *known} if not depth else names)
        group, _, setting = (homes[0] if len(homes) == 1 else present).rpartition(".")
        having = owners(self.config_dirs).get(group, {}).get(setting, ())
        if having and (group in LISTS or self.choices[group] not in having):
            has_it = " or ".join(f"{group}={name}" for name in having) + " has it"
            hint = has_it if present == given and not homes else f"{hint} (with {group}={', '.join(having)})"
        elif inside in known and inside not in LISTS and not hint.startswith(("did you mean", "it is called", "use ")):
            hint = self._of_another_option(inside, part) or hint
        place = f"{inside}={self.choices[inside]}" if inside in known else inside or "the config"
        if inside in known and hint == did_you_mean(part, ()):
            return f"{key}={value}: {place} has no settings"
        return f"{place} has no '{part}' ({key}={value}): {hint}"

    def _of_another_option(self, group: str, setting: str) -> str:
        """A hint at a similar setting, which the group's chosen option does not have and another one has; "" without one."""
        having = owners(self.config_dirs)[group]
        near = get_close_matches(setting, having, n=1)
        if not near:
            return ""
        has_it = " or ".join(f"{group}={name}" for name in having[near[0]])
        return f"did you mean '{group}.{near[0]}'? {has_it} has it"

    def _groups_with(self, setting: str) -> list[str]:
        """The groups of which an option has this setting; those whose chosen option has it come first."""
        having = {
            group: keys[setting] for group, keys in owners(self.config_dirs).items() if setting in keys and group not in LISTS
        }
        return sorted(having, key=lambda group: self.choices[group] not in having[group])

    def _unknown_in_sum(self, parts: list[str], value: object, depth: int, names: list[str]) -> str:
        """The problem of a key of a sum of options, whose keys are below their names."""
        group, part, key = parts[0], parts[depth], ".".join(parts)
        chosen = self.choices[group]
        having = [f"{group}.{name}.{part}" for name in chosen if name in owners(self.config_dirs)[group].get(part, ())]
        hint = f"set {' or '.join(having)}" if depth == 1 and having else did_you_mean(part, names)
        return f"{'.'.join(parts[:depth])} of {group}=[{','.join(chosen)}] has no '{part}' ({key}={value}): {hint}"

    def unknown_in_group(self, key: str, value: object) -> str | None:
        """The problem of a setting that no option of its group has: which option was meant is not known, its name is wrong."""
        group, setting, *_ = key.split(".")
        names = set(options(self.config_dirs)[group] if group in LISTS else owners(self.config_dirs)[group])
        if setting in names:
            return None
        return f"no option of {group} has '{setting}' ({key}={value}): {suggestion(f'{group}.{setting}', setting, names)}"
