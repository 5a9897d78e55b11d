"""Variants are trained to their ends with paired seeds; here the runs themselves are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import Interrupted, UserError
from drivetrain.core.selection import Reach
from drivetrain.launch.job import prepare
from drivetrain.measure.benchmark import variants
from drivetrain.measure.benchmark.variants import VariantSpec, swept
from drivetrain.run.result import Result


@pytest.fixture
def jobs(monkeypatch):
    """The jobs that were trained, each by its process."""
    found: list[Any] = []

    def run(job, folder, signals, quiet):
        found.append(job.job)
        folder.mkdir(parents=True)
        result = Result(status="completed", run_dir=folder)
        result.write(folder)
        return result

    monkeypatch.setattr(variants, "run_one", run)
    return found


def differences(one, other) -> set[str]:
    values = [job.composed.settings() for job in (one, other)]
    return {key for key in values[0].keys() | values[1].keys() if values[0].get(key) != values[1].get(key)}


def test_every_variant_is_trained_as_it_is_but_for_its_seed(jobs):
    """Also where each has a recipe of its own."""
    specs, _ = swept(["recipe=naive,fast", "data=digits", "runtime.seed=5"])
    assert differences(specs[0].job, specs[1].job) > {"surgery", "precision"}
    with variants.trainings("compare", specs[0].job) as train:
        runs = [train(spec, seed) for seed in (5, 6) for spec in specs]
        assert train(specs[0], 5) is runs[0], "none is trained twice"
    assert [(run.seed, run.error) for run in runs] == [(5, None), (5, None), (6, None), (6, None)]
    assert [job.run.runtime.seed for job in jobs] == [5, 5, 6, 6]
    assert [job.told for job in jobs] == [False, False, True, True], "what a variant advises is told once"
    for spec, job in zip([*specs, *specs], jobs, strict=True):
        assert differences(spec.job, job) <= {"output_dir", "runtime.seed"}
    assert not list(Path("outputs").rglob("*")), "the folders are gone"


def test_a_target_replaces_the_variants_own(jobs):
    words = ["model=mlp", "data=digits", "target=accuracy>=0.5"]
    spec = VariantSpec("it", words, prepare(words))
    with variants.trainings("tune", spec.job, Reach("accuracy", True, 0.9)) as train:
        train(spec, 0)
    assert jobs[0].run.values["target"] == "accuracy>=0.9"


def test_what_cannot_be_composed_is_told_with_its_name(jobs):
    spec = VariantSpec("it", ["model=mlp"], prepare(["model=mlp"]))
    with variants.trainings("compare", spec.job) as train:
        spec.overrides.append("optimizer.lr=fast")
        with pytest.raises(UserError, match=r"^it: optimizer.lr=fast"):
            train(spec, 0)


def test_a_signal_ends_the_trainings(monkeypatch):
    def run(job, folder, signals, quiet):
        signals.raised = 15
        return Result(status="interrupted", run_dir=folder)

    monkeypatch.setattr(variants, "run_one", run)
    spec = VariantSpec("it", ["model=mlp"], prepare(["model=mlp"]))
    with pytest.raises(Interrupted), variants.trainings("compare", spec.job) as train:
        train(spec, 0)
    assert not list(Path("outputs").rglob("*"))
