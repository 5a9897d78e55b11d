"""The JSON Schema of recipes, made from the existing options, so that editors complete and check recipes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from drivetrain.config import catalog, schema
from drivetrain.config.catalog import LISTS, SUMS
from drivetrain.config.plugins import trusted_packages
from drivetrain.config.validate import VALUES
from drivetrain.core.machine import process
from drivetrain.core.machine.paths import conf_dir
from drivetrain.core.user.code import import_name, trust_problems
from drivetrain.recipe.claims import Claim
from drivetrain.recipe.safe_yaml import OPERATOR_KEYS
from drivetrain.recipe.write import FORMS, SCHEMA

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NAMES_CODE = "own"  # options that name the user's code; no recipe may choose one
REFERENCE: Schema = {"type": "string", "pattern": r"^\$\{[a-z_]+(\.[a-z_0-9]+)*\}$", "description": "the value of another key"}
_COMMENT = re.compile(r"^(?P<key>[A-Za-z_]\w*):.*?\s#\s(?P<text>.*)$")


def recipe_schema(config_dirs: Sequence[str] = ()) -> Schema:
    """The schema of a recipe, with the options of plugins and of the user's own folders."""
    files = {group: of_group for group, of_group in catalog.option_files(config_dirs).items() if group not in OPERATOR_KEYS}
    of_options = {group: {name: _settings(file) for name, file in of_group.items()} for group, of_group in files.items()}
    defs: Schema = {f"{group}.{name}": _object(found) for group, names in of_options.items() for name, found in names.items()}
    defs |= {group: _section(group, names) for group, names in of_options.items()}
    defs |= {f"choice.{group}": _choice(group, of_group) for group, of_group in files.items()}
    defs["reference"] = REFERENCE
    defs["fitting"] = {"allOf": list(_fitting(of_options)), "description": "the keys of a group are those of its option"}
    defs["defaults"] = _defaults(files)
    settings = {
        "defaults": {"$ref": "#/$defs/defaults"},
        **{group: {"$ref": f"#/$defs/{group}"} for group in of_options},
        **_values(),
    }
    body = {"patternProperties": _dotted(of_options), "additionalProperties": False, "allOf": [{"$ref": "#/$defs/fitting"}]}
    return {
        "$schema": DIALECT,
        "title": f"A recipe of drivetrain {process.__version__}",
        "type": "object",
        "properties": {
            **_header(),
            "description": {"type": "string", "description": "the recipe's purpose"},
            **settings,
            "sweep": _sweep(of_options),
            "claim": {**_dataclass(Claim), "description": "measured results; they do not change the run"},
            "unchanged": {
                "type": "object", "properties": settings, **body,
                "description": "the defaults at the time of writing; the settings above override them",
            },
        },
        **body,
        "$defs": defs,
    }  # fmt: skip


def _header() -> dict[str, Schema]:
    texts = {key: {"type": "string", "pattern": f"^(?:{form})$"} for key, (form, _) in FORMS.items()}
    return {
        "schema": {"type": "integer", "minimum": 1, "maximum": SCHEMA, "description": "the version of this file format"},
        "drivetrain": {**texts["drivetrain"], "description": "the drivetrain version that wrote it"},
        "hash": {**texts["hash"], "description": "the hash of the resulting config"},
        "left_out": {"type": "array", "items": texts["left_out"], "description": "groups and keys that each user chooses"},
    }


def _dataclass(section: Any) -> Schema:
    """The schema of a section declared as a dataclass, such as the claim. Descriptions come from the fields' annotations."""
    hints = get_type_hints(section, include_extras=True)
    declared = {field.name: field for field in fields(section) if field.compare}  # other fields are not in the file
    required = [name for name, field in declared.items() if field.default is MISSING and field.default_factory is MISSING]
    shown = {name: {**_declared(hints[name]), **_about(hints[name])} for name in declared}
    return {"type": "object", "properties": shown, "required": required, "additionalProperties": False}


def _declared(hint: Any) -> Schema:
    """The schema that the annotation of a field allows: plain values, mappings, and sections of their own."""
    if get_origin(hint) is Annotated:
        return _declared(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return {"anyOf": [_declared(part) for part in get_args(hint)]}
    if is_dataclass(hint):
        return _dataclass(hint)
    if isinstance(hint, type) and issubclass(hint, dict):
        return {"type": "object"}
    return TypeAdapter(hint).json_schema()


def _about(hint: object) -> Schema:
    texts = [
        text for rule in getattr(hint, "__metadata__", ()) for name in ("about", "comment") if (text := getattr(rule, name, ""))
    ]
    return {"description": texts[0]} if texts else {}


def _settings(file: Path) -> dict[str, Schema]:
    """The settings of an option that a recipe may set, without types if its code is not trusted."""
    values = dict(catalog.content(file))
    target = str(values.pop("_target_"))
    values.pop("preset", None)  # only a task has one
    trusted = target in catalog.shipped_targets() or not any(trust_problems("", target, trusted_packages()))
    option = import_name(target) if trusted else None
    kinds = schema.of(option).hints if option is not None else {}
    local = option.machine_local_keys if option is not None else ()
    return described(catalog.key_lines(file), {k: v for k, v in values.items() if k not in local}, kinds)


def _values() -> dict[str, Schema]:
    """The keys of conf/config.yaml that are not groups."""
    values = {k: v for k, v in catalog.root_config().items() if k != "defaults" and k not in OPERATOR_KEYS}
    return described((conf_dir() / "config.yaml").read_text(encoding="utf-8").splitlines(), values, VALUES.hints)


def described(lines: Sequence[str], values: Mapping[str, object], kinds: Mapping[str, object]) -> dict[str, Schema]:
    """Key → the schema of its value, with its default and comment."""
    comments = {found["key"]: found["text"].strip() for line in lines if (found := _COMMENT.match(line))}
    return {
        key: {**_kind(kinds.get(key, Any)), "default": default, **({"description": comments[key]} if key in comments else {})}
        for key, default in values.items()
    }


def _kind(hint: Any) -> Schema:
    """The schema that an annotation allows; a reference to another key may replace any value."""
    try:
        schema = TypeAdapter(hint, config={"arbitrary_types_allowed": True}).json_schema()
    except (PydanticInvalidForJsonSchema, PydanticSchemaGenerationError):
        return {}
    return {"anyOf": [*schema.get("anyOf", [schema]), {"$ref": "#/$defs/reference"}]} if schema else {}


def _object(settings: Mapping[str, Schema]) -> Schema:
    return {"type": "object", "properties": dict(settings), "additionalProperties": False}


def _section(group: str, options: Mapping[str, Mapping[str, Schema]]) -> Schema:
    """The schema of a group's settings, for any of its options."""
    below = {name: {"$ref": f"#/$defs/{group}.{name}"} for name in options if name not in ("none", NAMES_CODE)}
    if group in LISTS:
        return _object(below)
    found: dict[str, dict[str, Schema]] = {}  # setting → its schema as text → a reference to it
    for name, of_option in options.items():
        for setting, about in of_option.items():
            place = {"$ref": f"#/$defs/{group}.{name}/properties/{setting}"}
            found.setdefault(setting, {}).setdefault(json.dumps(about), place)
    settings = {setting: {"anyOf": [*places.values()]} for setting, places in found.items()}
    return _object({**settings, **below, "weights": _kind(list[float] | None)} if group in SUMS else settings)


def _fitting(of_options: Mapping[str, Mapping[str, Mapping[str, Schema]]]) -> Iterator[Schema]:
    """For each option: if it is chosen, the group takes only its settings."""
    for group, names in of_options.items():
        for name in names if group not in LISTS else ():
            entry = {"properties": {f"override /{group}": {"const": name}}, "required": [f"override /{group}"]}
            chosen = {"properties": {"defaults": {"contains": entry}}, "required": ["defaults"]}
            yield {"if": chosen, "then": {"properties": {group: {"$ref": f"#/$defs/{group}.{name}"}}}}


def _choice(group: str, files: Mapping[str, Path]) -> Schema:
    """An option of a group, or several of them where the group takes several."""
    names = [name for name in files if name != NAMES_CODE]
    one = {"enum": names, "enumDescriptions": [catalog.summary(files[name]) for name in names]}
    several = {"type": "array", "items": one, "uniqueItems": True}
    if group in LISTS:
        return {"anyOf": [several, one]}
    return {"anyOf": [one, {**several, "minItems": 1}]} if group in SUMS else one


def _chosen(group: str) -> Schema:
    return {"$ref": f"#/$defs/choice.{group}"}


def _defaults(groups: Collection[str]) -> Schema:
    """The list of a recipe's options, each as `override /group: option` ("override" and "/" may be left out)."""
    entry = {
        "type": "object",
        "properties": {f"override /{group}": _chosen(group) for group in groups},
        "patternProperties": {f"^(optional )?(override )?/?{group}$": _chosen(group) for group in groups},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    }
    return {"type": "array", "items": {"anyOf": [entry, {"const": "_self_"}]}, "description": "the options of the groups"}


def _dotted(of_options: Mapping[str, Mapping[str, Mapping[str, Schema]]]) -> dict[str, Schema]:
    """Settings written as `group.setting: value`; the editor does not check their values."""
    found: dict[str, Schema] = {}
    for group, names in of_options.items():
        own = {setting for of_option in names.values() for setting in of_option} if group not in LISTS else set()
        below = {f"{name}\\.{setting}" for name, of_option in names.items() for setting in of_option if group in (*LISTS, *SUMS)}
        if own | below:
            found[f"^{group}\\.({'|'.join(sorted(own | below))})(\\..+)?$"] = {}
    return found


def _sweep(of_options: Mapping[str, Mapping[str, Mapping[str, Schema]]]) -> Schema:
    """The schema of the grid: a list of values for each key or group."""
    groups = {g: {"anyOf": [{"type": "array", "minItems": 1, "items": _chosen(g)}, _chosen(g)]} for g in of_options}
    return {
        "type": "object",
        "properties": {**groups, **{key: {} for key in _values()}},
        "patternProperties": _dotted(of_options),
        "additionalProperties": False,
        "minProperties": 1,
        "description": "a grid: a list of values for each key or group",
    }
