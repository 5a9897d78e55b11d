"""The table of limits in docs/security.md, made from the constants of the code: `python -m bench.limits` writes it."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

PAGE = Path(__file__).parents[1] / "docs" / "security.md"
BEGIN, END = "<!-- limits: made by make docs -->\n", "<!-- end of limits -->\n"
BYTES, COUNT, SECONDS = "bytes", "", "s"
LIMITS: list[tuple[str, str, str]] = [  # what is limited, its unit, the constant
    ("an override", "characters", "core.options.overrides:MAX_LENGTH"),
    ("an override's lists and mappings in each other", "levels", "core.options.overrides:MAX_DEPTH"),
    ("a recipe", BYTES, "recipe.safe_yaml:MAX_BYTES"),
    ("a recipe's values", COUNT, "recipe.safe_yaml:MAX_NODES"),
    ("a recipe's lists and mappings in each other", "levels", "recipe.safe_yaml:MAX_DEPTH"),
    ("a key of a recipe", "characters", "recipe.safe_yaml:MAX_KEY"),
    ("a text of a recipe", "characters", "recipe.safe_yaml:MAX_TEXT"),
    ("a whole number of a recipe", COUNT, "recipe.safe_yaml:MAX_WHOLE"),
    ("what references of a recipe stand for", "characters", "config.recipe_values:MAX_SIZE"),
    ("steps from reference to reference", COUNT, "config.recipe_values:MAX_STEPS"),
    ("jobs of a recipe's sweep", COUNT, "recipe.reader:MAX_JOBS"),
    ("a text of a recipe's claim", "characters", "recipe.sections:MAX_CHARACTERS"),
    ("a list of a recipe's claim", "items", "recipe.sections:MAX_ITEMS"),
    ("a number of a recipe's claim", COUNT, "recipe.sections:MAX_NUMBER"),
    ("fetching a recipe", SECONDS, "recipe.fetch:MAX_S"),
    ("redirects of a recipe's address", COUNT, "recipe.fetch:MAX_REDIRECTS"),
    ("jobs of a sweep", COUNT, "sweeps.store:MAX_JOBS"),
    ("stages of a run", COUNT, "config.stage_configs:LARGEST"),
    ("a config, record, result or manifest", BYTES, "core.machine.files:LARGEST"),
    ("an option of a plugin or of yours: its file", BYTES, "config.catalog:MOST"),
    ("a YAML file's levels", COUNT, "core.machine.files:DEEPEST"),
    ("a YAML file's values", COUNT, "core.machine.files:MOST_EVENTS"),
    ("a JSON file's lists, mappings and keys", COUNT, "core.machine.files:MOST_JSON"),
    ("a run's config and environment: values", COUNT, "run.reader:MAX_VALUES"),
    ("a run's config and environment: levels", COUNT, "run.reader:MAX_DEPTH"),
    ("folders between the one that is named and a run's", COUNT, "run.reader:DEEPEST"),
    ("metrics.jsonl", BYTES, "run.records:LARGEST"),
    ("a line of metrics.jsonl", BYTES, "run.records:LONGEST"),
    ("lines of metrics.jsonl that are no record", COUNT, "run.records:MOST_SPOILT"),
    ("such lines together", BYTES, "run.records:MOST_SPOILT_BYTES"),
    ("a size in a manifest", COUNT, "saving.manifest:MOST"),
    ("a manifest's tree of inputs", "levels", "saving.manifest:DEEPEST"),
    ("a checkpoint's structure, without its tensors", BYTES, "saving.content:MOST_PICKLE"),
    ("pieces.json of a sharded checkpoint", BYTES, "saving.sharded_checkpoint:MOST_PIECES"),
    ("averages of `ema=post_hoc`, without their tensors", BYTES, "ema.profiles:MOST_HEADER"),
    ("keys of a file of weights in each other", "levels", "model.weights:DEPTH"),
    ("the number of a token in a tokenizer.json", "digits", "data.tokenizer:MOST_DIGITS"),
    ("a chat template", "characters", "data.instructions:MOST_TEMPLATE"),
    ("a chat template's first two messages", SECONDS, "data.instructions:TEMPLATE_S"),
    ("their memory", BYTES, "data.instructions:MOST_MEMORY"),
    ("what a tokenizer makes of a text", "times its length", "data.untrusted:MOST_GROWTH"),
    ("layers that a config.json names", COUNT, "model.transformers:MOST_LAYERS"),
    ("modules of a model", COUNT, "core.machine.guards:MOST_MODULES"),
    ("a line of a table or of texts", "characters", "data.untrusted:MOST_LINE"),
    ("a file of a data set that is read whole", BYTES, "data.untrusted:MOST_WHOLE"),
    ("lines of a table's row", COUNT, "data.tables:MOST_LINES"),
    ("a shard's index", BYTES, "data.webdataset:MOST_INDEX"),
    ("a label of a shard", BYTES, "data.webdataset:MAX_LABEL_BYTES"),
    ("shards that a pattern names", COUNT, "data.webdataset:MAX_SHARDS"),
    ("index.json of stored samples", BYTES, "data.stored:MOST_INDEX"),
    ("a side of a stored image", "pixels", "data.stored:MAX_SIDE"),
    ("an image, where the data sets no limit", "pixels", "inference.transforms:MAX_PIXELS"),
    ("an archive of CIFAR-10, unpacked", BYTES, "data.cifar10:MAX_BYTES"),
    ("work in a process of its own", SECONDS, "core.machine.forking:LIMIT_S"),
    ("a stopped run's wait for its next batch", SECONDS, "core.machine.signals:STOP_WAIT_S"),
    ("a failed run's wait for a checkpoint that is written", SECONDS, "launch.worker:LAST_WRITE_S"),
    ("a message about bad input", "characters", "core.errors:MOST_SHOWN"),
]


def table() -> str:
    """The table, in Markdown."""
    rows = [f"| {what} | {_value(resolve_name(f'drivetrain.{place}'), unit)} |" for what, unit, place in LIMITS]
    return "\n".join(["| at most | |", "|---|---|", *rows]) + "\n"


def _value(value: float, unit: str) -> str:
    if unit == BYTES:
        size, name = next(
            (value / 2**power, name) for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if value >= 2**power
        )
        return f"{size:g} {name}"
    return f"{int(value) if value == int(value) else value:,} {unit}".strip()


def page(text: str) -> str:
    """The page with the table as it is now."""
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}{table()}{END}", text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
