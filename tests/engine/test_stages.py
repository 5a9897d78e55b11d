"""Stages: a run in parts equals the run that is resumed there, and each part has its own settings."""

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.options import horizon, stages
from drivetrain.core.world import World
from drivetrain.engine import build
from drivetrain.engine.context import RunContext
from drivetrain.engine.staged_run import StagedRun
from drivetrain.engine.step import PlainStep
from drivetrain.engine.trainer import Trainer
from drivetrain.inference import evaluation, finished
from drivetrain.launch import job as jobs
from drivetrain.launch import launcher
from drivetrain.measure.rehearse import flat
from drivetrain.run import reader, recipe_file
from tests.conftest import Sink

Words = Callable[..., list[str]]
MIXED = (
    "stages=[{until: 3, model.freeze: ['layers.0.*']}, {until: 2ep, optimizer.lr: 0.02, ema: ema, model.dropout: 0.5}, "
    "{clip: norm}]"
)
SCHEDULED = (
    "model.hidden=[16,16]",
    "optimizer=adamw",
    "scheduler=cosine",
    "model.dropout=0.3",
    "epochs=3",
    "updates=null",
)  # 4 updates an epoch
MIXED_RUN = (*SCHEDULED, MIXED)
TEXTS = (
    "data=stdlib", "data.max_files=40", "data.length=32", "task=language_modelling", "model=gpt", "model.width=16",
    "model.heads=2", "model.depth=1", "model.dropout=0.1", "batch=fixed", "batch.global_batch=8", "optimizer=adamw", "epochs=1",
    "updates=6",
)  # fmt: skip
LENGTHS = "stages=[{until: 2, data.length: 8}, {until: 4, data.length: 16, batch.global_batch: 8}]"


class Here(Exception):
    """The run is where the test wants it."""


@pytest.fixture
def staged(tiny: Words, tmp_path: Path) -> Iterator[Callable[..., StagedRun]]:
    """Build a tiny run with these words; its one log writer keeps the records."""

    def built(*words: str) -> StagedRun:
        run = StagedRun(RunContext(launcher.prepare(tiny(*words)).run, World(), tmp_path / "run"), [Sink()])
        contexts.append(run.context)
        run.build()
        return run

    contexts: list[RunContext] = []
    yield built
    for context in reversed(contexts):
        context.on_exit.close()


def left(trainer: Trainer) -> Any:
    """Everything that a run has at its end, apart from what it measured."""
    state = copy.deepcopy(trainer.state())
    return {**{k: v.clone() for k, v in trainer.model.state_dict().items()}, **state}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The shape of each micro-batch of training, and what it is computed in."""
    seen: list[tuple[Any, ...]] = []
    plain = PlainStep.micro_batch

    def watched(self: PlainStep, batch: Any, loss_sum: torch.Tensor) -> None:
        seen.append((*batch.x.shape, self.precision.dtype or "float32"))
        plain(self, batch, loss_sum)

    monkeypatch.setattr(PlainStep, "micro_batch", watched)
    return seen


@pytest.mark.parametrize(
    "words",
    [
        (
            "ema=ema",
            "batch=accumulate",
            "batch.accumulation_steps=2",
            "loader=workers",
            "loader.num_workers=1",
            "data=digits",
            "batch.global_batch=256",
        ),
        pytest.param(
            ("optimizer=lamb", "scheduler=plateau", "augment=[flip_crop,mixup]", "precision=bf16"), marks=pytest.mark.slow
        ),
    ],
)
def test_stages_that_change_nothing_leave_the_same_run(staged: Callable[..., StagedRun], words: tuple[str, ...]) -> None:
    found = []
    for more in ((), ("stages=[{until: 1ep}, {until: 6}]",)):
        run = staged(*SCHEDULED, *words, *more)
        run.fit()
        found.append((left(run.trainer), [{**r, "time": 0} for r in run.writers[0] if r["event"] == "evaluate"]))
    assert run.number == 2
    assert flat(found[0][0]) == flat(found[1][0])
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 3


@pytest.mark.parametrize(  # before a boundary within an epoch, at it, at one between epochs, and after it
    ("update", "words", "ends"),
    [
        (3, MIXED_RUN, (3, 8)),
        *(pytest.param(update, MIXED_RUN, (3, 8), marks=pytest.mark.slow) for update in (2, 8, 9)),
        *((update, (*TEXTS, LENGTHS), (2, 4)) for update in (1, 2)),
    ],
)
def test_a_resume_around_a_boundary_equals_the_uninterrupted_run(
    staged: Callable[..., StagedRun], update: int, words: tuple[str, ...], ends: tuple[int, int]
) -> None:
    def until(stream: Iterator[Any]) -> Iterator[Any]:
        while run.trainer.progress.updates != update:
            yield next(stream)
        raise Here

    def fit(run: StagedRun) -> None:
        enter = run._enter
        run._enter = lambda number: (enter(number), watch())  # type: ignore[assignment, func-returns-value]
        watch()
        run.fit()

    def watch() -> None:
        if run.trainer.stream_watchers[-1:] != [until]:
            run.trainer.stream_watchers = [*run.trainer.stream_watchers, until]

    whole = staged(*words)
    whole.fit()
    run = staged(*words)
    with pytest.raises(Here):
        fit(run)
    assert run.number == sum(update > end for end in ends)
    weights, state = {k: v.clone() for k, v in run.trainer.model.state_dict().items()}, copy.deepcopy(run.trainer.state())
    resumed = staged(*words)
    resumed.restore(weights, state)
    assert resumed.number == sum(update >= end for end in ends)
    resumed.fit()
    assert flat(left(whole.trainer)) == flat(left(resumed.trainer))
    begun, again = ([r["update"] for r in run.writers[0] if r["event"] == "stage"] for run in (whole, resumed))
    assert again == [at for at in begun if at >= update]  # those before are in the file


def test_each_stage_has_its_own_size_batch_and_precision(
    staged: Callable[..., StagedRun], steps: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Trainer] = []
    build_one = build.build
    monkeypatch.setattr(build, "build", lambda *given: built.append(trainer := build_one(*given)) or trainer)
    run = staged(
        "data=digits", "data.size=10", "model=resnet9", "model.width=2", "batch.global_batch=300", "epochs=5", "updates=null",
        "stages=[{until: 0.2, data.size: 8}, {until: 2ep, batch.global_batch: 500}, {until: 3ep, precision: bf16}, "
        "{until: 4ep, batch: accumulate, batch.accumulation_steps: 2}]",
    )  # fmt: skip
    run.fit()
    own = (300, 1, 10, 10)
    assert steps == [
        *[(300, 1, 8, 8, "float32")] * 3, *[(500, 1, 10, 10, "float32")] * 2, *[(*own, "bfloat16")] * 3,
        *[(150, 1, 10, 10, "float32")] * 6, *[(*own, "float32")] * 3,
    ]  # fmt: skip
    assert [r["update"] for r in run.writers[0] if r["event"] == "stage"] == [0, 3, 5, 8, 11]
    assert len(built) == 5  # each stage's step is built, and compiled, once
    assert run.trainer.max_updates == run.trainer.progress.updates == 14
    assert run.trainer.progress.samples == 4 * 900 + 1000


def test_a_stage_reads_the_first_tokens_of_the_runs_own_samples(
    staged: Callable[..., StagedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = PlainStep.micro_batch

    def watched(self: PlainStep, batch: Any, loss_sum: torch.Tensor) -> None:
        seen.append((batch.x.clone(), batch.y.clone()))
        plain(self, batch, loss_sum)

    monkeypatch.setattr(PlainStep, "micro_batch", watched)
    loaded: list[Any] = []
    for words in ((), (LENGTHS,)):
        run = staged(*TEXTS, *words)
        loaded.append(run.context.loaded)
        run.fit()
    assert run.context.loaded is loaded[1]  # the texts are read once
    whole, short = seen[:6], seen[6:]
    assert [x.shape[1] for x, _ in short] == [8, 8, 16, 16, 32, 32]
    for (x, y), (first, after) in zip(whole, short, strict=True):
        assert torch.equal(x[:, : first.shape[1]], first)
        assert torch.equal(y[:, : after.shape[1]], after)


def test_lengths_of_stages_that_cannot_be_are_refused(problems: Callable[..., list[str]]) -> None:
    assert "longer than the run's samples" in problems(*TEXTS, "stages=[{until: 2, data.length: 64}, {}]")[0]
    assert "count whole samples" in problems(*TEXTS, "batch=bucketed", LENGTHS)[0]
    classes = ("data=stdlib", "data.kind=class", "task=text_classification", "stages=[{until: 2, data.length: 8}, {}]")
    assert any("has other inputs here" in problem for problem in problems(*classes))


def test_frozen_parameters_stay_and_then_move_with_a_fresh_state(staged: Callable[..., StagedRun]) -> None:
    run = staged(*SCHEDULED, "stages=[{until: 1ep, model.freeze: ['layers.0.*']}, {until: 2ep, model.freeze: [head.*]}]")
    seen: list[dict[str, torch.Tensor]] = []
    tell = run._tell
    run._tell = lambda: (tell(), seen.append({k: v.clone() for k, v in run.trainer.model.state_dict().items()}))  # type: ignore[assignment, func-returns-value]
    run.fit()
    seen.append(run.trainer.model.state_dict())
    moved = [{k.rpartition(".")[0] for k in a if not torch.equal(a[k], b[k])} for a, b in pairwise(seen)]
    assert moved == [
        {"layers.1.linear", "head"},
        {"layers.0.linear", "layers.1.linear"},
        {"layers.0.linear", "layers.1.linear", "head"},
    ]
    optimizer = run.trainer.optimizer
    counts = {
        n: float(optimizer.state[p]["step"])
        for g in optimizer.param_groups
        for n, p in zip(g["param_names"], g["params"], strict=True)
    }
    assert counts == {
        "layers.0.linear.weight": 8, "layers.0.linear.bias": 8, "layers.1.linear.weight": 12, "layers.1.linear.bias": 12,
        "head.weight": 4, "head.bias": 4,
    }  # fmt: skip


def test_the_learning_rate_is_one_schedule_over_all_stages(staged: Callable[..., StagedRun]) -> None:
    words = ("scheduler=cosine", "epochs=3", "updates=null", "log_every=1")
    run = staged(*words, "stages=[{until: 1ep, batch.global_batch: 24}, {until: 2ep}, {optimizer.lr: 0.5}]")
    run.fit()
    rates = [(r["update"], r["lr"]) for r in run.writers[0] if r["event"] == "train"]
    assert [update for update, _ in rates] == list(range(1, 11))  # 2, 4 and 4 updates
    schedule = copy.deepcopy(run.trainer.scheduler)
    schedule.set_horizon(horizon.Horizon(10, [2, 6, 10]))
    assert rates == [(u, pytest.approx((0.05 if u <= 6 else 0.5) * schedule.lr_factor(u - 1))) for u, _ in rates]


def test_names_that_the_model_does_not_have_are_told_before_the_start_for_all_stages(staged: Callable[..., StagedRun]) -> None:
    stages = "{model.freeze: [nope.*]}", "{model.freeze: ['*']}", "{optimizer.lr_multipliers: {gone: 2}}"
    frozen = "{model.freeze: [head], optimizer.no_weight_decay: [head]}"  # nothing of the head trains there
    ends = ", ".join(f"{{until: {n}, {stage[1:]}" for n, stage in enumerate((*stages, frozen), 2))
    with pytest.raises(UserError) as refused:
        staged(*SCHEDULED, f"stages=[{{until: 1}}, {ends}, {{}}]")
    begins = [
        "stages[1]: model.freeze: 'nope.*' matches no parameter",
        "stages[2]: model.freeze freezes every parameter",
        "stages[3]: optimizer.lr_multipliers: 'gone' matches no trainable parameter",
        "stages[4]: optimizer.no_weight_decay: 'head' matches no trainable parameter",
    ]
    assert [problem.startswith(begin) for problem, begin in zip(refused.value.problems, begins, strict=True)] == [True] * 4
    with pytest.raises(UserError, match=r"stages\[1\]: optimizer.adamw: 'gone' matches no trainable parameter"):
        staged(*SCHEDULED, "optimizer=muon", "stages=[{until: 1}, {optimizer.adamw: [gone]}]")


def test_a_model_that_would_have_other_shapes_is_refused_before_the_start(staged: Callable[..., StagedRun]) -> None:
    with pytest.raises(UserError, match=r"stages\[1\].*model=mlp has parameters of another shape there \(layers.0.linear.weight"):
        staged("data=digits", "stages=[{until: 0.5, data.size: 10}, {data.size: 9}]")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("[{optimizer.lr: 1}, {}]", ["stages[0] has no until"]),
        ("[{untill: 3, optimizer.lr: 1}]", ["there is no 'untill': did you mean 'until'?"]),
        ("[{until: 1ep, model.hidden: [3]}]", ["model.hidden=[3] cannot change in the middle of a run: the weights continue"]),
        ("[{until: 1ep, runtime.seed: 3}]", ["the device and the seed are those of the whole run"]),
        ("[{until: 1ep, data.samples: 3}]", ["the samples and their order are one for the whole run"]),
        ("[{until: 1ep, parallel: ddp}]", ["the ranks are started once"]),
        ("[{until: 1ep, saving: best}]", ["the checkpoints belong to one run"]),
        ("[{until: 1ep, output_dir: a}]", ["output_dir=a: it applies to the whole run"]),
        ("[{until: 1ep, optimizer: adamw}]", ["a stage may change the keys of optimizer, not the option"]),
        ("[{until: 1ep, optimizer.lrr: 1, clip: nrom}]", ["clip=nrom is no option", "did you mean 'lr'?"]),
        (
            "[{until: 1ep, optimizer.lr: -1, batch.global_batch: 7, batch: accumulate}]",
            ["optimizer.lr=-1: must be > 0", "batch.global_batch=7 does not divide"],
        ),
        ("[{until: 1ep, batch: accumulate, batch.accumulation_steps: 7}]", ["stages[0]: batch.global_batch=12 does not divide"]),
        ("[{until: 2ep}, {until: 1ep}, {until: 40}]", ["not after update 8, where the stage before", "the run ends after 12"]),
        ("[{until: 0.01}, {}]", ["stages[0].until=0.01 is update 0, the start of the run"]),
        ("[{until: 5, batch.global_batch: 24}, {}]", ["each has whole epochs"]),
        ("[{until: 1.0}]", ["stages[0].until=1.0 could be the whole run or one update"]),
        ("[{until: true}]", ["stages[0].until=True: give a share"]),
        ("[{until: 5eps}]", ["stages[0].until=5eps is no length"]),
        ("[{until: 1ep, batch: auto}]", ["stages and batch=auto exclude each other"]),
        ("[{until: 1ep, batch: critical}]", ["stages and batch=critical exclude each other"]),
        ("[3]", ["stages=[3]: must be a mapping"]),
        ("[{until: 1ep, stages: []}]", ["a stage cannot have stages"]),
    ],
)
def test_what_a_stage_cannot_be_is_refused_with_the_reason(
    problems: Callable[..., list[str]], given: str, told: list[str]
) -> None:
    found = problems("epochs=3", "updates=null", f"stages={given}")
    assert all(any(part in problem for problem in found) for part in told), found
    assert len(found) == len(told), found


def test_all_problems_of_all_stages_are_told_at_once(problems: Callable[..., list[str]]) -> None:
    found = problems(
        "stages=[{until: 1, optimizer.lr: -1}, {until: x, model.name: a}, {batch.global_batch: 0}]",
        "clip=norm",
        "clip.max_norm=-1",
    )
    assert [problem.partition(":")[0] for problem in found] == ["clip.max_norm=-1", "stages[1].until=x is no length", "stages[1]"]


def test_a_boundary_that_changes_nothing_is_advised_against(tiny: Words) -> None:
    job = launcher.prepare(tiny("stages=[{until: 1, optimizer.lr: 0.05}]"))
    assert job.notices == ["stages[0] and the rest of the run have the same config: nothing changes at until=1"]
    assert not launcher.prepare(tiny("stages=[{until: 1, optimizer.lr: 0.1}]")).notices


def test_a_stages_option_takes_no_keys_of_the_runs_other_option(tiny: Words) -> None:
    job = launcher.prepare(tiny("clip=norm", "clip.max_norm=3", "stages=[{until: 1, clip: none}]"))
    assert [stage.run.named("clip") for stage in job.run.stages] == ["clip=none", "clip=norm"]


def test_a_run_and_its_recipe_have_the_same_stages(train: Callable[..., Any], tmp_path: Path) -> None:
    result = train("stages=[{until: 1, optimizer.lr: 0.1, model.unfreeze: {}, clip: norm}, {augment: [flip_crop]}]")
    job, again = (jobs.prepare(words) for words in (result.overrides, [f"recipe={result.run_dir}/recipe.yaml"]))
    assert [stage.title for stage in again.run.stages] == [stage.title for stage in job.run.stages]
    assert again.config_hash == job.config_hash == result.config_hash
    assert not [line for line in again.notices if "hash" in line]
    assert recipe_file.compared(job.composed, job.machine_local_keys) == reader._read_config(result.run_dir)
    log = (Path(result.run_dir) / "log.txt").read_text()
    assert "update 1: stage 2 of 2, to the end: augment=[flip_crop]" in log


def test_a_recipe_may_set_in_a_stage_what_it_may_set_at_all(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "defaults: [{override /model: mlp}]\nstages:\n- {until: 0.5, model: {dropout: 0.1}}\n- model.freeze: ['layers.0.*']\n"
    )
    job = jobs.prepare([f"recipe={recipe}"])
    assert [stage.settings for stage in job.run.stages] == ["model.dropout=0.1", "model.freeze=[layers.0.*]"]
    recipe.write_text("stages: [{until: 0.5, model.freeze: ['a b; c']}, {until: 0.7, trust: [x]}, {clip: norm}]\n")
    with pytest.raises(UserError) as refused:
        jobs.prepare([f"recipe={recipe}"])
    assert "stages[1]: trust=" in str(refused.value)
    recipe.write_text("stages: [{until: 0.5, model.freeze: ['a b; c']}]\n")
    with pytest.raises(UserError, match=r"a recipe cannot set model\.freeze="):
        jobs.prepare([f"recipe={recipe}"])


def test_shares_of_stages_are_of_the_runs_updates(tiny: Words) -> None:
    run = launcher.prepare(
        tiny("epochs=4", "updates=null", "stages=[{until: 1ep, batch.global_batch: 24}, {until: 0.5}, {clip: norm}]")
    ).run
    assert [share for _, share in stages.alone(run)] == [2 / 14, 4 / 14, 8 / 14]
    assert [alone.batch.size(0) for alone, _ in stages.alone(run)] == [24, 12, 12]
    assert all(not alone.stages for alone, _ in stages.alone(run))


def test_a_finished_run_is_evaluated_with_the_settings_of_the_stage_that_made_the_checkpoint(train: Callable[..., Any]) -> None:
    words = "data=digits", "model=resnet9", "model.width=2", "batch.global_batch=500", "epochs=2", "updates=null"
    stages_ = "stages=[{until: 1ep, data.size: 9, optimizer.lr: 0.001, clip: norm, clip.max_norm: 1}, {data.size: 11, ema: ema}]"
    result = train(*words, stages_, "saving=best", "saving.keep=2")
    for update, size in ((2, 9), (4, 11)):
        job = finished.find("drivetrain evaluate", Path(result.run_dir), choice=finished.Choice(update=str(update))).job
        assert (job.run.data.size, job.run.stages, job.run.named("clip")) == (size, [], "clip=none")
    best = result.metrics["validation"]["best"]
    found = evaluation.evaluate(result.run_dir, choice=finished.Choice(update="best", split="validation"))
    assert found.metrics["accuracy"] == best["accuracy"]
    assert found.update == best["update"]
