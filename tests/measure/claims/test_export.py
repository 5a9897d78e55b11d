"""`drivetrain recipe export RUN [RUN …] [FILE]`: one config, its seeds, and what they measured."""

import json
import re
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.launch.job import prepare
from drivetrain.measure.claims.export import ExportSettings, export
from drivetrain.recipe import reader as recipe
from drivetrain.recipe.claims import Claim
from drivetrain.run import recipe_file
from tests.support.put import put
from tests.support.refusals import problems_of

DATA = {"hash": "deadbeef0123", "of": "content", "samples": 1150}
VERSIONS = {"torch": "2.15.0", "timm": "1.0"}
RECIPE = "defaults:\n  - override /model: mlp\nruntime:\n  seed: {seed}\n"


def made_run(
    name: str,
    seed: int,
    accuracy: float = 0.9,
    reached: int | None = 40,
    config: str = "",
    environment: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    """A run that ended with this accuracy, and had 0.8 after `reached` updates, one a second."""
    folder = Path(name)
    put(folder / "recipe.yaml", RECIPE.format(seed=seed))
    (folder / "config.yaml").write_text(f"runtime:\n  seed: {seed}\nmodel:\n  hidden: [8]\n{config}")
    about = {"time": 1.7e9 + seed, "versions": VERSIONS, "drivetrain": "0.1.0", "python": "3.11"}
    (folder / "environment.json").write_text(json.dumps({**about, **(environment or {})}))
    figures = {"accuracy": accuracy, "loss": 1 - accuracy}
    content = {
        "status": "completed", "updates": 100, "device": "cpu", "device_name": "a chip, 2 threads", "data": DATA,
        "metrics": {"validation": {"final": figures}, "test": {"final": {"accuracy": accuracy - 0.1, "loss": 0.5}}},
        "selection": {"metric": "accuracy", "better": "max"}, "peak_memory_bytes": (400 + seed) * 2**20,
        "own_process": True,
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps({**content, **result}))
    lines = [
        {"event": "evaluate", "update": n, "epoch": 1, "set": "validation", "time": 1000.0 + n,
         "accuracy": 0.8 if reached is not None and n >= reached else 0.1, "loss": 0.5}
        for n in range(10, 101, 10)
    ]  # fmt: skip
    lines.insert(0, {"event": "train", "update": 0, "epoch": 0, "time": 1000.0, "samples": 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def exported(*runs: Path, **settings: object) -> Claim | None:
    """The claim of these runs, as a reader of the written recipe finds it."""
    Path("made.yaml").write_text(export(runs, ExportSettings(**settings)))
    return recipe.read(Path("made.yaml")).claim


def refusals(*runs: Path, **settings: object) -> str:
    refused = problems_of(export, runs, ExportSettings(**settings))
    assert all(problem.isprintable() for problem in refused)
    return "\n".join(refused)


def test_several_seeds():
    runs = [
        made_run(f"runs/{seed}", seed, value, reached) for seed, value, reached in ((3, 0.9, 40), (1, 0.92, 60), (2, 0.94, 50))
    ]
    claim = exported(*runs, target="accuracy>=0.8")
    quality = claim.quality
    assert (quality.metric, quality.set, quality.n) == ("accuracy", "validation", 3)
    assert (quality.mean, quality.sd) == pytest.approx((0.92, 0.02))
    assert quality.interval == pytest.approx((0.92 - 0.049683, 0.92 + 0.049683), abs=1e-5)  # t(0.975, 2) · 0.02 / √3
    assert str(claim.target) == "accuracy>=0.8 after 50 updates, 50.0 s, 3 of 3 runs"
    assert (claim.target.slowest, claim.memory.peak_mib, claim.memory.n) == (60, 403, 3)
    assert (claim.seeds, claim.energy, claim.speed) == ((1, 2, 3), None, None)
    assert (claim.data.hash, claim.data.samples) == (DATA["hash"], DATA["samples"])
    assert (claim.device.kind, claim.device.name) == ("cpu", "a chip, 2 threads")
    assert (claim.versions, claim.measured) == ({"torch": "2.15.0", "drivetrain": "0.1.0"}, "2023-11-14")
    text = Path("made.yaml").read_text()
    assert "  seed: 1\n" in text, "the recipe is that of the first seed"
    assert "# and of the same with other seeds or folds: runs/2, runs/3" in text


def test_folds():
    """A claim over folds is of all of them, with each seed; their training samples differ, and those of the first are named."""
    of = "data:\n  folds: 2\n  fold: {}\n".format
    runs = [made_run(f"runs/{n}", 1, 0.9 + n / 50, config=of(n), data={**DATA, "hash": f"{n}" * 9}) for n in (1, 0)]
    claim = exported(*runs)
    assert (claim.seeds, claim.folds, claim.quality.n, claim.quality.mean) == ((1,), 2, 2, pytest.approx(0.91))
    assert claim.data.hash == "0" * 9
    more = made_run("runs/2", 2, config=of(0))
    assert "data.folds=2: a claim is over all folds with each seed, 4 runs, and these are 3" in refusals(*runs, more)
    again = made_run("runs/3", 1, config=of(0))
    assert "several runs have runtime.seed=1 data.fold=0" in refusals(*runs, again)


TARGET = {"target": "accuracy>=0.8"}
TWO = [{"accuracy": 0.9}, {"accuracy": 0.92}]
AVERAGED = {"validation": {"final": {"accuracy": 0.5, "ema_accuracy": 0.75}}}
ELSEWHERE = {"own_process": False}  # in a process that did other work, whose memory is no claim of a run on its CPU


@pytest.mark.parametrize(
    ("runs", "settings", "claimed"),
    [
        ([{}], {}, {"quality.mean": 0.9, "quality.n": 1, "quality.sd": None, "quality.interval": None, "target": None}),
        # What is claimed may be chosen.
        (TWO, {"set": "test"}, {"quality.mean": pytest.approx(0.81)}),
        (
            TWO, {"metric": "loss", "target": "loss<=0.5"},
            {"quality.metric": "loss", "quality.mean": pytest.approx(0.09), "target.reach": "loss<=0.5"},
        ),
        (TWO, {"target": "0.8"}, {"target.reach": "accuracy>=0.8"}),  # of the metric that ranks the runs' models
        # A seed that never reaches the target is the slowest.
        (
            [{"reached": reached} for reached in (40, None, 50)], TARGET,
            {"target.reached": 2, "target.n": 3, "target.updates": 50, "target.seconds": 50, "target.slowest": None},
        ),
        (
            [{"reached": reached} for reached in (40, None, 50, None)], TARGET,
            {"target.reached": 2, "target.n": 4, "target.updates": None, "target.seconds": None},
        ),
        # The time of a resumed run includes that in which it stood still, and its memory is that of its last part.
        ([{"resumed_at": 50}, {}], TARGET, {"target.updates": 40, "target.seconds": None, "memory.n": 1, "quality.n": 2}),
        ([{"metrics": AVERAGED}], {}, {"quality.mean": 0.75}),  # a run that averages its weights claims the average
        ([ELSEWHERE], {}, {"memory": None}),
        ([{**ELSEWHERE, "device": "cuda"}], {}, {"memory.n": 1}),
    ],
)  # fmt: skip
def test_what_runs_claim(runs, settings, claimed):
    made = [made_run(str(number), **{"seed": number, **of}) for number, of in enumerate(runs, 1)]
    claim = exported(*made, **settings)
    assert {key: attrgetter(key)(claim) for key in claimed} == claimed


DIVERGED = {"status": "diverged", "error": "the loss is nan"}


@pytest.mark.parametrize(
    ("runs", "settings", "told"),
    [
        (
            [{}, {"config": "epochs: 9\n"}, {"config": "optimizer:\n  lr: 0.5\n"}], {},
            "a claim over seeds is of one config, and these runs differ in epochs: None, 9; optimizer.lr: None, 0.5",
        ),
        ([{}, {"seed": 1}], {}, "several runs have runtime.seed=1"),
        ([{}, {"device_name": "another"}], {}, "different devices: a chip, 2 threads, another"),
        ([{}, {"environment": {"versions": {"torch": "2.11.0"}}}], {}, "different versions: {'torch': '2.15.0'"),
        ([{}, {"data": {**DATA, "hash": "0123abcdef"}}], {}, "different training data: deadbeef0123, 0123abcdef"),
        (
            [{}, DIVERGED], {},
            "2: diverged: the loss is nan: a claim is over runs that have completed, and none may be left out",
        ),
        ([DIVERGED], {"target": "accuracy>=0.5"}, "diverged"),
        ([{}], {"set": "train"}, "set=train: these runs have not evaluated it"),
        ([{}], {"metric": "accurracy"}, "metric=accurracy: these runs do not evaluate it: did you mean 'accuracy'?"),
        ([{}], {"target": "f1>=0.5"}, "target=f1>=0.5: these runs do not evaluate it"),
        ([{}], {"target": "good"}, "target=good: give a metric and a value, as 'target=accuracy>=0.98'"),
    ],
)  # fmt: skip
def test_what_cannot_be_claimed_is_refused(runs, settings, told):
    """Of runs that differ in more than the seed, of a seed that is left out, of what the runs do not have."""
    made = [made_run(str(number), **{"seed": number, **of}) for number, of in enumerate(runs, 1)]
    assert told in refusals(*made, **settings)


def test_a_run_that_is_given_twice_is_refused_and_the_recipe_of_one_that_diverged_can_be_had():
    assert "is given twice" in refusals(made_run("1", 1), Path("./1"))
    assert exported(made_run("2", 2, **DIVERGED)) is None


def said_of(run: Path) -> str:
    """The recipe that a run exports, which a reader takes, or why it exports none."""
    try:
        text = export([run])
    except UserError as error:
        return "".join(error.problems)
    Path("made.yaml").write_text(text)
    recipe.read(Path("made.yaml"))
    return text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("metrics", "all"),
        ("metrics", {"validation": [1]}),
        ("metrics", {"validation": {"final": {"accuracy": "\033[2J", "loss": float("nan")}}}),
        ("metrics", {"validation": {"final": {"accuracy": 10**400}}}),
        ("device_name", "\033[2J\nclaim: 1"),
        ("device_name", {"a": 1}),
        ("device", "cpu\nevil: 1"),
        ("data", [1, 2]),
        ("data", {"hash": "../../etc", "of": "\033", "samples": -1}),
        ("peak_memory_bytes", "1"),
        ("energy_joules", -5),
        ("selection", {"metric": "\033[2J", "better": "max"}),
        ("selection", ["accuracy"]),
        ("error", {"a": 1}),
        ("samples_per_second", "fast"),
        ("wall_s", None),
    ],
)
def test_a_strangers_run_writes_no_claim_that_a_reader_would_refuse(key, value):
    run = made_run("1", 1, **{key: value})
    text = said_of(run)
    assert "\033" not in text
    assert "evil" not in [line.partition(":")[0].strip() for line in text.splitlines()]


@pytest.mark.parametrize("content", ["[]", "{", '{"versions": [1]}', '{"time": "x", "versions": {"torch": 5}}'])
def test_a_damaged_record_is_no_traceback(content):
    run = made_run("1", 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"event": "evaluate", "time": "x"}\n{"event": "evaluate", "update": [1]}\n{"event": []}\n')
    (run / "environment.json").write_text(content)
    said_of(run)
    (run / "config.yaml").write_text("runtime:\n  seed: one\n")
    assert "does not say runtime.seed" in refusals(run)


NET = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def __init__(self, width=4):\n        super().__init__(width, 10)\n"


def test_the_recipe_of_a_run_with_own_code_says_what_the_command_line_has_to(capsys, says, monkeypatch, tmp_path):
    Path("exported_nets.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    own = ["model=own", "model.target=exported_nets.Net", "trust=[exported_nets]"]
    job = prepare([*own, "model.kwargs.width=8", "runtime.device=cpu"])
    Path("run").mkdir()
    job.write_files(Path("run"))
    assert main.main(["recipe", "export", "run", "mine.yaml"]) == 0
    words = "model=own model.target=exported_nets.Net 'trust=[exported_nets]'"
    assert f"run it by `drivetrain train recipe=mine.yaml {words}`" in capsys.readouterr().out
    assert f"give {words} on the command line" in Path("mine.yaml").read_text()
    assert "left to the command line: mine.yaml:" in says("recipe", "check", "mine.yaml")
    for file in ("mine.yaml", "run/recipe.yaml"):
        again = prepare([f"recipe={file}", *own, "runtime.device=cpu"])
        assert (again.config_hash, again.run.model.kwargs) == (job.config_hash, {"width": 8})
        assert list(recipe_file.notices(again.shared, (), ["exported_nets"])) == []
    with pytest.raises(UserError, match="it names code"):
        prepare(["recipe=mine.yaml"])


def test_the_command(says, refused):
    runs = [str(made_run(f"outputs/{seed}", seed)) for seed in (1, 2)]
    assert "written to mine.yaml: run it by `drivetrain train recipe=mine.yaml`" in says(
        "recipe", "export", *runs, "mine.yaml", "target=accuracy>=0.8"
    )
    assert recipe.read(Path("mine.yaml")).claim.target.reach == "accuracy>=0.8"
    for words, told in (
        ((*runs, "mine.yaml"), "mine.yaml is there already"),
        ((*runs, "no/mine.yaml"), "there is no folder no"),
        (("mine.yaml",), "needs a run's directory"),
        (("outputs",), "outputs is no run's directory"),
        ((*runs, "targt=1"), "targt=1 is no run's directory"),
    ):
        assert told in refused("recipe", "export", *words)


# --- `drivetrain recipe diff`: the keys that differ, what each side came to, and a measurement where it is asked for ---

CLAIM = """\
defaults:
  - override /precision: bf16
claim:
  speed: {ratio: 1.91, interval: [1.85, 1.97], against: {precision: fp32}}
  device: {kind: cpu, name: a chip}
  versions: {torch: 2.15.0}
"""


@pytest.fixture
def diff(says):
    """Its output; it must succeed."""
    return partial(says, "recipe", "diff")


def cells(said: str) -> dict[str, list[str]]:
    """A table's rows by their names."""
    rows = [re.split(r"  +", line.strip()) for line in said.splitlines() if line.startswith(" ") and line.strip()]
    return {name: texts for name, *texts in rows}


def test_two_recipes(diff):
    Path("a.yaml").write_text(CLAIM)
    said = diff("a.yaml", "naive", "epochs=3")
    found = cells(said)
    assert found["precision"] == ["bf16", "tf32"]
    assert found["optimizer"] == ["adamw", "sgd"]
    assert found["optimizer.lr"] == ["0.003", "0.02"]
    assert "optimizer.nesterov" not in found, "an option's settings stand there only where both have them"
    assert not {"epochs", "saving", "logger", "recipe"} & set(found)
    assert "a.yaml claims 1.91 × (1.85 to 1.97) the samples a second of precision=fp32; on a chip" in said
    assert "to measure the difference: drivetrain compare recipe=a.yaml,naive epochs=3" in said
    assert not Path("outputs").exists()


def test_the_same(diff):
    assert "the configs are the same" in diff("naive", "naive")


def test_two_runs(diff, train, tiny):
    one, other = train("optimizer.lr=0.05").run_dir, train("optimizer.lr=0.01", "updates=3").run_dir
    found = cells(diff(one, other))
    assert found["optimizer.lr"] == ["0.05", "0.01"]
    assert found["updates"] == ["2", "3"]
    assert found["status"] == ["completed", "completed"]
    results = [json.loads((run / "result.json").read_text()) for run in (one, other)]
    assert found["accuracy at the end"] == [f"{r['metrics']['test']['final']['accuracy']:.4f}" for r in results]
    assert found["run time"] == [f"{r['wall_s']:.1f} s" for r in results]
    assert "torch" not in found, "versions stand there where they differ"
    facts = json.loads((other / "environment.json").read_text())
    facts["versions"]["torch"] = "1.13\033[2J"
    (other / "environment.json").write_text(json.dumps(facts))
    said = diff(one, other)
    assert cells(said)["torch"][1].split()[0] == "1.13"
    assert "\033" not in said, "files of a run steer no terminal"


def test_a_run_and_the_recipe_it_leaves(diff, tiny, tmp_path):
    """They are the same, and its recipe is what is measured: own code is not started from a run's files."""
    (run_dir := tmp_path / "run").mkdir()
    prepare(tiny("precision=bf16", "optimizer.momentum=0.5")).write_files(run_dir)
    assert "the configs are the same" in diff(run_dir, run_dir / "recipe.yaml")
    assert f"drivetrain compare recipe={run_dir}/recipe.yaml,naive" in diff(run_dir, "naive")
    spoilt = {"versions": {"torch": {"a": 1}}, "git_commit": ["x"]}
    (run_dir / "environment.json").write_text(json.dumps(spoilt))
    assert not {"torch", "git_commit"} & set(cells(diff(run_dir, "naive")))
    for name in ("environment.json", "recipe.yaml"):
        (run_dir / name).unlink()
    assert cells(diff(run_dir, "naive"))["optimizer.lr"] == ["0.05", "0.02"], "one that left little is shown as far as it goes"
