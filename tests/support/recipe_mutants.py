"""Texts of recipes, made at random: those that ship and made ones, with changes of their structure and of their text."""

import re
from typing import Any

import yaml
from hypothesis import strategies as st

from drivetrain.config.catalog import LISTS, option_files
from drivetrain.core.machine.files import read_yaml
from drivetrain.core.machine.paths import recipes_dir


class Raw(str):
    """Text that is written to the file as it is."""


# --- what recipes are made of ---

SHIPPED = [read_yaml(file) for file in sorted(recipes_dir().glob("*.yaml"))]
FILES = {g: {name: read_yaml(file) for name, file in files.items()} for g, files in option_files().items()}
SETTINGS = sorted(
    f"{group}.{f'{name}.' if group in LISTS else ''}{setting}"
    for group, of_group in FILES.items()
    for name, content in of_group.items()
    for setting in content
)
OPERATORS = ["hydra", "trust", "resume", "recipe", "output_dir", "logger", "callbacks", "hydra.run.dir", "model._target_", "<<"]
TOP = [
    "defaults",
    "description",
    "sweep",
    "claim",
    "epochs",
    "updates",
    "evaluate_every",
    "evaluate_batch",
    "log_every",
    "select",
    "forward_input",
    "forward_output",
]
ODD = ["", ".", "a.", "a b", "x" * 300, "\x1b"]

NUMBERS: list[Any] = [
    0, -1, 1, 2, 7, 0.5, 1e-9, 1e300, 10**9, 10**12, 2**63, 2**64, -(10**18), Raw("1" + "0" * 400), Raw("1" * 5000), Raw(".inf"),
    Raw("-.inf"), Raw(".nan"), Raw("1e999"), Raw("-0.0"), Raw("0x" + "f" * 300), Raw("1_000"), Raw("010"), Raw("190:20:30"),
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "a", "auto", "none", "null", "~", "true", "5ep", "9" * 400 + "ep", "1e400ep", "0ep", "-1ep", "nan", "*", "[", "{",
    "%s", "../../etc/passwd", "/etc/passwd", "/dev/zero", "/proc/self/mem", ".", "..", "file:///etc/passwd", "http://127.0.0.1:1/x",
    "hf-hub:a/b", "local-dir:.", "hf://a/b", "s3://a/b", "pipe:touch PWNED", "posix.system", "os", "__import__('os')", "x" * 3000,
    "\x1b[2J", "\x07", "\u202e", "\u2028", "\ud7ff", "\U0001f600", "é" * 500, "a\nb", "???", "$", "}", "${a", "${optimizer.lr",
    "${optimizer.lr}", "${model}", "${nope}", "${oc.env:HOME}", "${oc.decode:1}", "${hydra:run.dir}", "${optimizer.lr}" * 30,
    "\\${a}", "${.lr}", "${..model}",
]  # fmt: skip
SHAPES: list[Any] = [
    None, True, False, [], {}, [[]], [{}], {"a": {}}, [1, "a", None], [0] * 100, {"a": {"b": {"c": 1}}}, {"": 1}, {"a b": 1},
]  # fmt: skip
FRAGMENTS = [
    "!!python/object/apply:posix.system [ls]", "!!binary aGVsbG8=", "!!set {a, b}", "!x y", "&a [1]", "*a", "2020-01-01",
    "2020-99-99", "=", "<<", "? a", "- a", "|\n  a", ">\n  a", "'", '"', "@", "`", "%", "#", "---", "...", "\t", "\u0000",
    "\ufeff", "[" * 60, "{a: " * 9, "{[a]: 1}", "{? {a: 1} : 2}", "{a: 1, a: 2}", "{_target_: posix.system}",
    "[{_target_: posix.system}]", "{1: 2, null: 3}", "{'': 1}", "yes", "0b1", "1.2.3", '"\\x1b[2J"', '"\\0"', '"\\uD800"',
]  # fmt: skip

odd_values = st.one_of(
    st.sampled_from([*NUMBERS, *TEXTS, *SHAPES, *map(Raw, FRAGMENTS)]), st.integers(), st.floats(), st.text(max_size=20)
)
keys = st.sampled_from([*SETTINGS, *[*TOP, *FILES, *OPERATORS, *ODD] * 3]) | st.text(max_size=5)


@st.composite
def entries(draw: st.DrawFn) -> Any:
    """An entry of `defaults`: an option of a group, as a rule one that there is."""
    group = draw(st.sampled_from(list(FILES)))
    option: Any = draw(st.sampled_from(list(FILES[group])))
    if group in LISTS or draw(st.integers(0, 9)) == 0:
        option = draw(st.lists(st.sampled_from(list(FILES[group])), max_size=3))
    return {f"override /{group}": draw(odd_values) if draw(st.integers(0, 9)) == 0 else option}


@st.composite
def made(draw: st.DrawFn) -> dict[str, Any]:
    """A recipe of some options, with values of settings that they have."""
    recipe: dict[str, Any] = {"description": "made", "defaults": draw(st.lists(entries(), max_size=4))}
    for entry in recipe["defaults"]:
        ((key, option),) = entry.items()
        group = key.removeprefix("override /")
        for name in option if isinstance(option, list) and group in LISTS else [option]:
            content = FILES[group].get(name, {}) if isinstance(name, str) else {}
            for setting in draw(st.lists(st.sampled_from(sorted(content)), max_size=3, unique=True)) if content else []:
                key = f"{group}.{f'{name}.' if group in LISTS else ''}{setting}"
                recipe[key] = draw(st.sampled_from([content[setting], content[setting], *alike(content[setting])]))
    return recipe


def alike(value: Any) -> list[Any]:
    """Extreme values of the same kind, which pass more checks than others do."""
    if isinstance(value, bool | str):
        return [True, False, "auto", "5ep"]
    if isinstance(value, list):
        return [[], [[]], [0], [1, 2, 3], [10**12] * 3, ["a"], ["*"]]
    if isinstance(value, dict):
        return [{}, {"a": 1}, {"*": 10**9}, {"a": {"b": 0.5}}, {"a": [1]}]
    return [0, 1, 2, 7, 1000, 10**9, 10**12, 2**62] if isinstance(value, int) else [0.0, 1e-300, 0.5, 1.0, 2, 1e9, 1e300, 10**12]


# --- mutations ---


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of each value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path] * bool(path) + [place for key, value in items for place in places(value, (*path, key))]


def mutated(tree: Any, path: tuple[Any, ...], kind: str, key: str, value: Any) -> Any:
    """A copy of a tree with one change at `path`."""
    first, *rest = path
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    if rest:
        copy[first] = mutated(tree[first], tuple(rest), kind, key, value)
    elif kind == "remove":
        del copy[first]
    elif kind == "replace":
        copy[first] = value
    elif kind == "nest":
        copy[first] = {key: copy[first]}
    elif kind == "list":
        copy[first] = [copy[first], value]
    elif isinstance(copy, list):
        copy.append(value)
    else:
        copy[key] = copy.pop(first) if kind == "rename" else value
    return copy


KINDS = ["remove", "replace", "replace", "replace", "nest", "list", "rename", "add", "add"]


@st.composite
def mutants(draw: st.DrawFn) -> str:
    """The text of a recipe that ships, or of a made one, with a few changes of its structure and perhaps one of its text."""
    tree: Any = draw(st.sampled_from(SHIPPED) | made() | made())
    for _ in range(draw(st.integers(0, 3))):
        if paths := places(tree):
            tree = mutated(tree, draw(st.sampled_from(paths)), draw(st.sampled_from(KINDS)), draw(keys), draw(odd_values))
    if draw(st.integers(0, 5)) == 0:
        tree = {**tree, "sweep": draw(st.dictionaries(keys, odd_values | st.lists(odd_values, max_size=40), max_size=3))}
    text = "\n".join(written(tree, 0)) + "\n"
    if draw(st.integers(0, 5)) == 0:
        at, length = draw(st.integers(0, len(text))), draw(st.integers(0, 5))
        text = text[:at] + draw(st.text(max_size=3) | st.sampled_from(FRAGMENTS)) + text[at + length :]
    return text


def written(tree: Any, depth: int) -> list[str]:
    """A mapping as lines of YAML."""
    lines = []
    for key, value in tree.items():
        name = key if isinstance(key, str) and re.fullmatch(r"\w[\w /.]*\w", key) else scalar(str(key))
        if isinstance(value, dict) and value and depth < 12:
            lines += [f"{'  ' * depth}{name}:", *written(value, depth + 1)]
        else:
            lines.append(f"{'  ' * depth}{name}: {scalar(value)}")
    return lines


def scalar(value: Any) -> str:
    """A value in YAML's flow style."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(str(k))}: {scalar(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if isinstance(value, str):
        return value if value.isalnum() else yaml.safe_dump(value, default_style='"', width=10**6, allow_unicode=True).strip()
    return yaml.safe_dump(value).splitlines()[0]
