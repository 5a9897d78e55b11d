"""batch.plan=noise: the stages of batch size that follow from the noise scale which a run has logged."""

from typing import Any

from drivetrain.launch.batch_plan import stages
from drivetrain.launch.launcher import prepare
from tests.support.to_end import run_to_end

PLANNED = [
    "batch=accumulate", "batch.accumulation_steps=2", "batch.plan=noise", "batch.global_batch=12", "epochs=3", "updates=null",
    "log_every=1",
]  # fmt: skip


def test_a_batch_doubles_up_to_the_median_noise_scale_of_its_epoch_and_never_falls() -> None:
    noise = [(0, 20.0), (1, 70.0), (1, 500.0), (1, 60.0), (3, 10.0), (4, 1e9)]
    assert stages(noise, 6, 16, 1000) == [(1, 16), (4, 64), (6, 512)]
    assert stages([], 3, 16, 1000) == [(3, 16)]


def test_a_run_writes_a_recipe_with_its_stages_which_trains(train: Any) -> None:
    made = train(*PLANNED, "saving=none")
    planned = made.run_dir / "planned.yaml"
    job = prepare([f"recipe={planned}"])
    batches = [(stage.run.batch.global_batch, stage.run.batch.accumulation_steps) for stage in job.run.stages]
    assert job.run.batch.plan is None
    assert all(size % 12 == 0 and size // steps == 6 for size, steps in batches or [(12, 2)])
    assert "stages:" in planned.read_text()


def test_a_planned_recipe_trains_each_stage_with_its_batch(train: Any, monkeypatch: Any) -> None:
    from drivetrain.launch import batch_plan

    monkeypatch.setattr(batch_plan, "stages", lambda *_: [(1, 12), (3, 24)])
    made = train(*PLANNED, "saving=none")
    again = run_to_end([f"recipe={made.run_dir / 'planned.yaml'}", f"output_dir={made.run_dir.parent}"])
    stages_ = prepare([f"recipe={made.run_dir / 'planned.yaml'}"]).run.stages
    assert [(each.run.batch.global_batch, each.run.batch.accumulation_steps) for each in stages_] == [(12, 2), (24, 4)]
    assert again.updates < made.updates


def test_what_cannot_be_planned_is_refused(problems: Any) -> None:
    assert "accumulation_steps=2" in problems(*PLANNED, "batch.accumulation_steps=1")[0]
    assert "leave out" in problems(*PLANNED, "batch.grow_every=1")[0]
