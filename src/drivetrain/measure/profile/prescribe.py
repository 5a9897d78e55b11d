"""What was proven to be faster, as a command to copy and a recipe to keep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.overrides import key_of
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure.benchmark.compare import Row
from drivetrain.measure.claims import write as claim
from drivetrain.measure.tune.candidates import over


def prescribe(
    verb: str, words: Sequence[str], more: Sequence[str], config_dirs: Sequence[str], base: Row, row: Row, folder: Path,
    said: Sequence[str] = (),
) -> None:  # fmt: skip
    """Print the command, and write folder/recipe.yaml; the user's own code and paths, which no recipe may hold, stay words."""
    assert row.ratio is not None
    gain = f"{row.ratio.middle:.2f} × the samples a second ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
    dirs = [part for place in config_dirs for part in ("-cd", str(place))]
    tuned = over(words, more, config_dirs)
    print(f"\n{gain}:\n  drivetrain train {shlex.join([*dirs, *tuned])}")
    if base.global_batch != row.global_batch:
        print(
            f"  an update is the mean over {row.global_batch} samples now, not {base.global_batch}: look at the learning rate "
            "again (batch.lr_scaling, drivetrain tune what=lr), and at the result (drivetrain compare … quality=true)"
        )
    job, before = prepare_job(tuned, config_dirs), prepare_job(words, config_dirs)
    comments = [f"drivetrain {verb}: {' '.join(more)} gives {gain}, measured in turns with the run as it was", *said]
    (folder / "recipe.yaml").write_text(claim.recipe_text(job, claim.against(job, before), row, base, comments))
    theirs = claim.own_groups(job) | job.machine_local_keys - {"recipe"}
    mine = [w for w in words if key_of(w).split(".")[0] in theirs or key_of(w) in theirs]
    print(f"  drivetrain train {shlex.join([*dirs, f'recipe={folder}/recipe.yaml', *mine])}")
    print(f"elsewhere, does it hold?\n  drivetrain recipe verify {shlex.join([*dirs, f'{folder}/recipe.yaml', *mine])}")
