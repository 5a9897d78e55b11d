"""Command lines of options, values, sweeps and verbs, well formed and not: each would start, or is refused in our words."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from drivetrain.cli import main, verbs
from drivetrain.config.catalog import LISTS
from drivetrain.core.errors import FAILED, UserError
from drivetrain.launch.job import prepare
from tests.support import odd
from tests.support.effects import Begins
from tests.support.recipe_mutants import FILES, FRAGMENTS, NUMBERS, ODD, SETTINGS, SHAPES, TEXTS, TOP, alike, scalar

SECONDS = 10.0  # a command may stand for hundreds of configs, as `drivetrain ablate` and sweeps do
SWEPT = [
    "a=1,2", "range(1,4)", "range(0,1e9)", "range(1,2,0)", "range(3)", "choice(a,b)", "choice()", "interval(0,1)",
    "interval(1,0)", "glob(*)", "glob([a-c]*,exclude=b)", "tag(log,interval(1e-4,1e-1))", "sort(3,1,2)", "shuffle(1,2)",
    "extend_list(1)", "int(3.5)", "float(a)", "str([1])", "json_str({a:1})", "{1,2}", "[1,2],[3]", "{a:1},{b:2}", "1,,2", ",",
    "1,", "'a,b'",
]  # fmt: skip
WORDS = [
    "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.run.dir=a",
    "hydra.sweep.dir=b", "hydra.sweep.subdir=${hydra.job.num}", "hydra.mode=MULTIRUN", "hydra.job.name=x", "hydra/launcher=nope",
    "hydra.verbose=true", "hydra.searchpath=[.]", "hydra.job.chdir=true", "~hydra.run", "hydra.callbacks.a._target_=os.system",
    "hydra.sweeper.params.optimizer.lr=1,2", "hydra/job_logging=none", "hydra.output_subdir=null", "--cfg", "job", "hydra", "all",
    "--resolve", "-p", "--package", "optimizer", "_global_", "-i", "--info", "config", "defaults", "plugins", "searchpath", "-q",
    "-r", "-cd", ".", "nowhere", "--config-dir", "-cn", "fast", "--config-name", "--help", "-h", "-m", "--multirun", "--out",
    "x.json", "--rounds", "3", "-1", "--", "-", "--quick", "rounds=2", "seeds=x", "target=0.9", "out=.", "measure=maybe",
    "quality=1", "update=best", "split=nope", "average=true", "metric=loss", "set=test", "--shell-completion", "outputs", "~",
    "/dev/null", "recipe.yaml", "a b", "", "x" * 300, "é", "\x1b[2J", "\udc80", "resume=.", "resume=nowhere", "resume=auto",
    "resume=/dev/null", "resume=null", "recipe=fast", "recipe=nope", "recipe=.",
]  # fmt: skip
VERBS = ["train"] * 12 + ["recipe", "recipe", *verbs.VERBS, "help", "--version", "nope", "optimizer=sgd"]
OF_RECIPE = ["list", "show", "check", "export", "verify", "diff", "schema", "inspect", "nope"]
NINES = "9" * 400
ODD_WORDS = [  # each of which once was a crash, or might be one
    "epochs=1e999", "epochs=nan", "epochs='${a'", "epochs=${a", "optimizer.lr=1" + "0" * 400, "updates=0x" + "f" * 500,
    f"scheduler.warmup={NINES}", f"scheduler.warmup={NINES}ep", "scheduler.warmup=inf", "model={}", "model=[1,2]", "data=[]",
    "optimizer={lr:1}", "augment={a:1}", "trust={a:1}", "callbacks={a:1}", "callbacks={a:{_target_:1}}", "model.freeze={a:1}",
    "model.hidden={a:1}", "data.shape={}", "data.shape=[[[]]]", "recipe=" + "x" * 3000, "resume=" + "x" * 3000, "x" * 3000,
    "model=" + "x" * 3000, "x" * 3000 + "=1", "=", "~", "@", "model@x=1", "epochs='\\", "model.unfreeze={a:1e999}",
]  # fmt: skip
FOUND = [
    *(["train", word] for word in ODD_WORDS),
    ["train", "-m", "epochs=range(1,4,0)"],
    ["train", "-m", "epochs=range(0,1e9)"],
    ["train", "model@x=1"],
    ["train", "~"],
]

any_key = st.sampled_from([*SETTINGS, *TOP, *FILES])
options = st.sampled_from([(group, option) for group, of_group in FILES.items() for option in of_group])


@st.composite
def settings(draw: st.DrawFn) -> str:
    """A setting of an option, with its value or an extreme one of its kind."""
    group, option = draw(options)
    values = {k: v for k, v in FILES[group][option].items() if k not in ("_target_", "preset")}
    if not values:
        return f"{group}={option}"
    setting = draw(st.sampled_from(sorted(values)))
    chosen: Any = draw(st.sampled_from([values[setting], values[setting], *alike(values[setting])]))
    return f"{group}.{f'{option}.' if group in LISTS else ''}{setting}={scalar(chosen)}"


def settings_of(keys: st.SearchStrategy[str], values: list[Any]) -> st.SearchStrategy[str]:
    """Keys with odd values."""
    texts = st.sampled_from([each if isinstance(each, str) else scalar(each) for each in values])
    return st.builds("{}={}".format, keys, texts)


plain = st.one_of(
    settings(), settings(), settings(), options.map(lambda o: f"{o[0]}={f'[{o[1]}]' if o[0] in LISTS else o[1]}"), 
    st.sampled_from(WORDS), settings_of(any_key, SWEPT), settings_of(any_key | st.sampled_from(ODD), [*NUMBERS, *TEXTS, *SHAPES]),
)  # fmt: skip


@st.composite
def spoilt(draw: st.DrawFn) -> str:
    """A word with something before it, or in it."""
    word = draw(st.sampled_from(["+", "++", "~", "-", "--", " ", "'", ""])) + draw(plain)
    at, gone = draw(st.integers(0, len(word))), draw(st.integers(0, 3))
    return word[:at] + draw(st.sampled_from(["", *FRAGMENTS, "=", "==", ",", "'", "${", "\n"])) + word[at + gone :]


words = st.lists(st.one_of(plain, plain, plain, plain, spoilt()), max_size=4)
swept = st.builds(lambda some, axis: ["train", "-m", *some, axis], words, settings_of(st.sampled_from(SETTINGS), SWEPT))
shown = st.builds(lambda some, what: ["train", *some, "--cfg", what], words, st.sampled_from(["job", "all", "hydra"]))
of_recipe = st.builds(lambda verb, some: ["recipe", verb, *some], st.sampled_from(OF_RECIPE), words)
others = st.builds(lambda verb, some: [verb, *some], st.sampled_from(VERBS), words)


def run(words: list[str]) -> None:
    """Run a command until it builds a run. Raises UserError for its exit code 2, and AssertionError for 1."""
    said = io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(said), no_building():
        code = main.main(words)
    text = said.getvalue()
    if code == FAILED and "DRIVETRAIN_TRACEBACK" in text:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), no_building():
            main._dispatch(words)  # the exception itself
    assert code in (0, 2, 4), text
    if code == 2:
        raise UserError(text.splitlines())


@contextlib.contextmanager
def no_building() -> Iterator[None]:
    """Building a run ends the command; it is known before whether the words are good."""
    with contextlib.ExitStack() as stack:
        for name in ("launch.launcher.launch", "engine.build.build", "engine.build.build_for_inference"):
            stack.enter_context(mock.patch(f"drivetrain.{name}", side_effect=Begins("a run")))
        yield


@odd.fuzz
def test_odd_commands_start_or_are_refused() -> None:
    import drivetrain.engine.build  # once, because an import that is stopped cannot be repeated

    assert drivetrain.engine.build is not None
    prepare([])
    drawn = st.one_of(swept, shown, of_recipe, others, others, others)
    odd.tried(drawn, lambda words: odd.outcome(lambda: run(words), starts=True, seconds=SECONDS), FOUND)
