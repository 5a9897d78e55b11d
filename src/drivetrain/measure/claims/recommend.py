"""Recommends a change that was measured to be faster: as a command to copy, and as a recipe with its claim."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.overrides import key_of
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark.row import Row
from drivetrain.measure.claims import write
from drivetrain.measure.overrides import apply
from drivetrain.ui.output import echo


def recommend(
    verb: str,
    overrides: Sequence[str],
    changes: Sequence[str],
    config_dirs: Sequence[str],
    base: Row,
    row: Row,
    folder: Path,
    notes: Sequence[str] = (),
    file: Path | None = None,
) -> list[str]:
    """Print the commands, and write the recipe to `file`, or else to folder/recipe.yaml. Return the commands.

    `row` measured the run with `changes`, `base` the run without. The user's own code and paths, which no recipe may hold,
    stay overrides in the printed commands.
    """
    assert row.ratio is not None
    gain = f"{row.ratio.middle:.2f} × the samples a second ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
    dirs = [argument for folder_ in config_dirs for argument in ("-cd", str(folder_))]
    changed = apply(overrides, changes, config_dirs)
    command = f"drivetrain train {shlex.join([*dirs, *changed])}"
    of_the_run = write.of_the_run(row, base)
    echo(f"\n{gain}:\n  {command}")
    for line in of_the_run:
        echo(f"  {line}")
    if base.global_batch != row.global_batch:
        echo(
            f"  an update is the mean over {row.global_batch} samples now, not {base.global_batch}: check the learning rate "
            "(batch.lr_scaling, drivetrain tune what=lr) and the result (drivetrain compare … quality=true) again"
        )
    job, before = prepare_job(changed, config_dirs), prepare_job(overrides, config_dirs)
    evidence = f"drivetrain {verb}: {' '.join(changes)} gives {gain}, measured in interleaved rounds against the run without"
    recipe = file or folder / "recipe.yaml"
    recipe.write_text(
        write.recipe_text(job, write.against(job, before), row, base, [evidence, *of_the_run, *notes]), encoding="utf-8"
    )
    local = write.own_groups(job) | job.machine_local_keys - {"recipe"}
    kept = [o for o in overrides if key_of(o).split(".")[0] in local or key_of(o) in local]
    by_recipe = f"drivetrain train {shlex.join([*dirs, f'recipe={recipe}', *kept])}"
    verify = f"drivetrain recipe verify {shlex.join([*dirs, str(recipe), *kept])}"
    echo(f"  {by_recipe}\nto check it on another machine:\n  {verify}")
    return [command, by_recipe, f"{verify}  # checks it on another machine"]
