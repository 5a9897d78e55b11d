"""Command lines: words of options, values, sweeps and verbs, well formed and not."""

from __future__ import annotations

import contextlib
import functools
import io
import random
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.effects import Begins
from tests.support.recipe_mutants import FILES, FRAGMENTS, KNOBS, NUMBERS, ODD, SHAPES, TEXTS, TOP, alike, scalar

from bench.fuzz.judged import Example
from drivetrain.cli import main, verbs
from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import FAILED, UserError
from drivetrain.launch.job import prepare

SWEPT = [
    "a=1,2", "range(1,4)", "range(0,1e9)", "range(1,2,0)", "range(3)", "choice(a,b)", "choice()", "interval(0,1)",
    "interval(1,0)",
    "glob(*)", "glob([a-c]*,exclude=b)", "tag(log,interval(1e-4,1e-1))", "sort(3,1,2)", "shuffle(1,2)", "extend_list(1)",
    "int(3.5)", "float(a)", "str([1])", "json_str({a:1})", "{1,2}", "[1,2],[3]", "{a:1},{b:2}", "1,,2", ",", "1,", "'a,b'",
]  # fmt: skip
OF_HYDRA = [
    "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.run.dir=a",
    "hydra.sweep.dir=b", "hydra.sweep.subdir=${hydra.job.num}", "hydra.mode=MULTIRUN", "hydra.job.name=x", "hydra/launcher=nope",
    "hydra.verbose=true", "hydra.searchpath=[.]", "hydra.job.chdir=true", "~hydra.run", "hydra.callbacks.a._target_=os.system",
    "hydra.sweeper.params.optimizer.lr=1,2", "hydra/job_logging=none", "hydra.output_subdir=null",
]  # fmt: skip
FLAGS = [
    "--cfg", "job", "hydra", "all", "--resolve", "-p", "--package", "optimizer", "_global_", "-i", "--info", "config", "defaults",
    "plugins", "searchpath", "-q", "-r", "-cd", ".", "nowhere", "--config-dir", "-cn", "fast", "--config-name", "--help",
    "-h", "-m",
    "--multirun", "--out", "x.json", "--rounds", "3", "-1", "--", "-", "--quick", "rounds=2", "seeds=x", "target=0.9", "out=.",
    "measure=maybe", "quality=1", "update=best", "split=nope", "average=true", "metric=loss", "set=test", "--shell-completion",
]  # fmt: skip
PLAIN = [
    "fast",
    ".",
    "nowhere",
    "outputs",
    "~",
    "/dev/null",
    "recipe.yaml",
    "a b",
    "",
    "optimizer",
    "x" * 300,
    "é",
    "\x1b[2J",
    "\udc80",
]
RESUMED = [
    "resume=.",
    "resume=nowhere",
    "resume=auto",
    "resume=/dev/null",
    "resume=null",
    "recipe=fast",
    "recipe=nope",
    "recipe=.",
]
VERBS = ["train"] * 12 + ["recipe", "recipe", *verbs.VERBS, "help", "--version", "nope", "optimizer=sgd"]
OF_RECIPE = ["list", "show", "check", "export", "verify", "diff", "schema", "inspect", "bundle", "nope"]


SECONDS = 10.0  # a command may stand for hundreds of configs, as `drivetrain ablate` and sweeps do


def examples(place: Path, count: int, seed: int) -> Iterator[Example]:
    """Yield command lines. One that would train, measure or write is accepted, and stopped there."""
    prepare([])
    import drivetrain.engine.build  # once, because an import that is stopped cannot be repeated

    assert drivetrain.engine.build is not None
    folder = place / "here"
    folder.mkdir(exist_ok=True)
    draw = random.Random(seed)
    with contextlib.chdir(folder):
        for _ in range(count):
            words = command_line(draw)
            yield Example(f"{words[0]}: {words!r:.2000}", functools.partial(run, words), starts=True, seconds=SECONDS)


def command_line(draw: random.Random) -> list[str]:
    """One command line."""
    verb = draw.choice(VERBS)
    words = [word(draw) for _ in range(draw.randint(0, 4))]
    if verb == "train" and draw.random() < 0.3:
        words = ["-m", *words, f"{draw.choice(KNOBS)}={draw.choice(SWEPT)}"]
    if verb == "train" and draw.random() < 0.2:
        words += ["--cfg", draw.choice(["job", "all", "hydra"])]
    return [verb, *([draw.choice(OF_RECIPE)] if verb == "recipe" else []), *words]


def word(draw: random.Random) -> str:
    """One word, as a rule one that there is."""
    kind = draw.random()
    if kind < 0.35:
        made = _knob(draw)
    elif kind < 0.55:
        group = draw.choice(list(FILES))
        option = draw.choice(list(FILES[group]))
        made = f"{group}={f'[{option}]' if group in LISTS else option}"
    elif kind < 0.75:
        made = draw.choice([*FLAGS, *OF_HYDRA, *PLAIN, *RESUMED])
    elif kind < 0.85:
        made = f"{draw.choice([*KNOBS, *TOP, *FILES])}={draw.choice(SWEPT)}"
    else:
        made = f"{draw.choice([*KNOBS, *TOP, *FILES, *ODD])}={_odd(draw)}"
    if draw.random() < 0.1:
        made = draw.choice(["+", "++", "~", "-", "--", " ", "'"]) + made
    if draw.random() < 0.1:
        at = draw.randint(0, len(made))
        made = made[:at] + draw.choice([*FRAGMENTS, "=", "==", ",", "'", "${", "\n"]) + made[at + draw.randint(0, 3) :]
    return made


def _knob(draw: random.Random) -> str:
    key = draw.choice(KNOBS)
    group, _, rest = key.partition(".")
    name, _, knob = rest.partition(".")
    contents = [FILES[group].get(name, {})] if group in LISTS else FILES[group].values()
    values: list[Any] = [v for content in contents for k, v in content.items() if k == (knob or name)]
    value = draw.choice(values or [0])
    return f"{key}={scalar(draw.choice([value, value, *alike(value)]))}"


def _odd(draw: random.Random) -> str:
    value = draw.choice([*NUMBERS, *TEXTS, *SHAPES])
    return value if isinstance(value, str) else scalar(value)


def run(words: list[str]) -> None:
    """Run a command until it builds a run. Raises UserError for its exit code 2, and AssertionError for 1."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said), _no_building():
        code = main.main(words)
    text = said.getvalue()
    if code == FAILED and "DRIVETRAIN_TRACEBACK" in text:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _no_building():
            main._dispatch(words)  # the exception itself
    if code == FAILED:
        raise AssertionError(text)
    if code == 2:
        raise UserError(text.splitlines())


@contextlib.contextmanager
def _no_building() -> Iterator[None]:
    """Building a run ends the example; it is known before whether the words are good."""
    begins = Begins("a run")
    with (
        mock.patch("drivetrain.launch.launcher.launch", side_effect=begins),
        mock.patch("drivetrain.engine.build.build", side_effect=begins),
        mock.patch("drivetrain.engine.build.build_for_inference", side_effect=begins),
    ):
        yield
