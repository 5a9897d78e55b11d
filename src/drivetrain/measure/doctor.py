"""`drivetrain doctor`: where a step's time goes, the one thing that is wrong, and the overrides that are proven to help."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain import rundir, terminal
from drivetrain.errors import DONE, UserError
from drivetrain.job import Job
from drivetrain.job import prepare as prepare_job
from drivetrain.measure import claim, compare, settings
from drivetrain.measure.compare import Entry, Row
from drivetrain.measure.diagnose import Problem, diagnose, reached
from drivetrain.measure.progress import Steps
from drivetrain.spec import Count, Positive
from drivetrain.words import key_of

if TYPE_CHECKING:
    from drivetrain.measure.examine import Findings


@dataclass
class Settings:
    """What the command itself can be told."""

    look_s: Positive = 2.0  # at the step, in each of several ways
    rounds: Count = 8
    turn_s: Positive = 0.4
    prove: bool = True  # try the overrides; false: only look


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain doctor`; its exit code."""
    asked, words = settings.split(argv, Settings)
    compare.afresh("doctor", words)
    job = prepare_job(words, config_dirs)
    said = []
    if job.run.parallel.distributed:
        said.append("looked at on one rank: what the ranks cost each other is for `drivetrain compare parallel=single,ddp`")
        job = prepare_job([*words, "parallel=single"], config_dirs)
    root = Path(job.run.values["output_dir"])
    with Steps() as say:
        say("looking at the step")
        found = _examined(job, root, asked.look_s)
    problems = sorted(diagnose(found, job), key=lambda p: -p.share)
    _show(found, problems, said)
    if not asked.prove:
        return DONE
    won = prove(problems, words, config_dirs, asked)
    return _prescribe(won, words, root, config_dirs)


def _examined(job: Job, root: Path, look_s: float) -> Findings:
    """What `examine` finds, in a process of its own. Raises UserError with what went wrong there."""
    import torch  # noqa: F401 - once, here; the process is forked

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    folder = rundir.create(root, "doctor")
    sys.stdout.flush()
    sys.stderr.flush()
    process: Any = context.Process(target=_look, args=(job, folder, look_s, theirs))
    try:
        process.start()
        theirs.close()
        try:
            told = ours.recv()
        except EOFError:
            process.join()
            raise UserError(f"the examined run's process ended with code {process.exitcode}") from None
        if isinstance(told, str):
            raise UserError(told.splitlines())
        return told
    finally:
        process.kill()
        process.join()
        rundir.remove(folder)


def _look(job: Job, folder: Path, look_s: float, connection: Connection) -> None:
    from drivetrain import build, check
    from drivetrain.measure.examine import examine
    from drivetrain.plan import World

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        check.verify(job.run)
        connection.send(examine(build.build(job.run, World(), folder, []), look_s))
    except UserError as error:
        connection.send(str(error))
    except Exception as error:
        connection.send(f"the run cannot be examined: {type(error).__name__}: {error}")
    os._exit(0)


def _show(found: Findings, problems: list[Problem], said: list[str]) -> None:
    total = sum(found.phases.values())
    rows = [(name, f"{ms:.2f} ms", f"{ms / total:.0%}") for name, ms in found.phases.items()]
    rows.append(("an update, unwatched", f"{found.step_ms:.2f} ms", ""))
    rows.append(("an evaluation", f"{found.evaluation_s:.2f} s", ""))
    if found.saving_s is not None:
        rows.append(("a checkpoint", f"{1e3 * found.saving_s:.0f} ms", ""))
    terminal.table(("phase", "time", "of the update"), rows)
    for line in [*said, reached(found)]:
        print(line)
    print(f"\nverdict: {problems[0].verdict}\n  {problems[0].evidence}")
    for problem in problems[1:]:
        if problem.name != "compute":
            print(f"also: {problem.verdict}\n  {problem.evidence}")


def prove(problems: list[Problem], words: list[str], config_dirs: Sequence[str], asked: Settings) -> list[tuple[str, Row, Row]]:
    """Try what could help against the run as it is, then what won together.

    The winners, the best first: words, row, and the row of the run as it is.
    """
    tries = list(dict.fromkeys(t for problem in problems for t in problem.overrides))

    def entry(label: str, more: Sequence[str]) -> Entry:  # with the run's own saving: it may be what is wrong
        return compare.entry(label, [*words, *more], config_dirs, own=())

    base = entry("as it is", [])
    entries = [e for t in tries if (e := entry(t, t.split())).job is not None]
    if not entries:
        print("\nno override is known to help with that")
        return []
    print(f"\ntrying {len(entries)} overrides")
    measured = compare.Settings(rounds=asked.rounds, turn_s=asked.turn_s)
    done = compare.measure([base, *entries], measured, words)
    compare.show(done)
    won = [(r.label, r, done.rows[0]) for r in done.rows[1:] if r.ratio is not None and r.ratio.low > 1]
    won.sort(key=lambda found: -found[1].ratio.middle)  # type: ignore[union-attr]
    together = _together([label for label, _, _ in won])
    joined = entry(together, together.split())
    if won and together not in [label for label, _, _ in won] and joined.job is not None:
        print("\ntogether")
        best = won[0][0]
        done = compare.measure([base, entry(best, best.split()), joined], measured, words)
        compare.show(done)
        alone, both = done.rows[1].ratio, done.rows[2].ratio
        if both is not None and alone is not None and both.low > 1 and both.middle > alone.middle:
            won.insert(0, (together, done.rows[2], done.rows[0]))
    return won


def _together(labels: Sequence[str]) -> str:
    """The winners' words at once; of those that set the same key, or another option's knobs, the better one's."""
    taken: dict[str, str] = {}
    for label in labels:
        keys = [word.partition("=")[0] for word in label.split()]
        if not {k.split(".")[0] for k in keys} & {k.split(".")[0] for k in taken}:
            taken |= {word.partition("=")[0]: word for word in label.split()}
    return " ".join(taken.values())


def _prescribe(won: list[tuple[str, Row, Row]], words: list[str], root: Path, config_dirs: Sequence[str]) -> int:
    """The best as a command and a recipe; the user's own code and paths, which no recipe may hold, stay words."""
    if not won:
        print("\nnothing that was tried is faster beyond doubt: the run stays as it is")
        return DONE
    label, row, base = won[0]
    assert row.ratio is not None
    gain = f"{row.ratio.middle:.2f} × the samples a second ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
    dirs = [part for folder in config_dirs for part in ("-cd", str(folder))]
    print(f"\n{gain}:\n  drivetrain train {shlex.join([*dirs, *words, *label.split()])}")
    job, before = prepare_job([*words, *label.split()], config_dirs), prepare_job(words, config_dirs)
    said = f"drivetrain doctor: {label} gives {gain}, measured in turns with the run as it was"
    folder = rundir.create(root, "doctor")
    (folder / "recipe.yaml").write_text(claim.recipe_text(job, claim.against(job, before), row, base, [said]))
    own = claim.own_groups(job)
    theirs = own | job.operators - {"recipe"}
    mine = [w for w in words if key_of(w).split(".")[0] in theirs or key_of(w) in theirs]
    print(f"  drivetrain train {shlex.join([*dirs, f'recipe={folder}/recipe.yaml', *mine])}")
    print(f"elsewhere, does it hold?\n  drivetrain recipe verify {shlex.join([*dirs, f'{folder}/recipe.yaml', *mine])}")
    return DONE
