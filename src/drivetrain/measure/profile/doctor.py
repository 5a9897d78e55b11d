"""`drivetrain doctor`: where a step's time goes, the one thing that is wrong, and the overrides that are proven to help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.core.cpus import usable_cores
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.option import Count, Positive
from drivetrain.launch.job import Job
from drivetrain.launch.job import prepare as prepare_job
from drivetrain.measure import arguments
from drivetrain.measure.benchmark import compare
from drivetrain.measure.benchmark.compare import Entry, Row
from drivetrain.measure.benchmark.stopping import no_gain
from drivetrain.measure.profile import prescribe
from drivetrain.measure.profile.diagnose import Problem, diagnose, reached
from drivetrain.measure.profile.isolated import apart
from drivetrain.measure.tune.candidates import over
from drivetrain.run import directory
from drivetrain.ui import terminal
from drivetrain.ui.progress import Steps

if TYPE_CHECKING:
    from drivetrain.measure.profile.step import Findings


LOOKS = 3  # at the ranks together


@dataclass
class Settings:
    """What the command itself can be told."""

    look_s: Positive = 2.0  # at the step, in each of several ways
    rounds: Count = 8
    turn_s: Positive = 0.4
    prove: bool = True  # try the overrides; false: only look


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain doctor`; its exit code."""
    asked, words = arguments.split(argv, Settings)
    compare.afresh("doctor", words)
    job = prepare_job(words, config_dirs)
    root = Path(job.run.values["output_dir"])
    ranks = job.run.parallel.ranks() if job.run.parallel.distributed else 1
    share = _share_of_a_rank(job, ranks) if ranks > 1 else []
    with Steps() as say:
        say("looking at the step")
        alone = prepare_job(over(words, share, config_dirs), config_dirs)
        found = apart(partial(_examine, look_s=asked.look_s), alone)
    if ranks > 1:
        found.phases["communication"] = _communication(words, share, config_dirs, asked)
    problems = sorted(diagnose(found, alone, ranks), key=lambda p: -p.share)
    shared = f"of one of {ranks} ranks by itself: a batch of {alone.run.batch.size(0)}, the whole model"
    _show(found, problems, [shared] if ranks > 1 else [])
    if not asked.prove:
        return DONE
    return _prescribe(prove(problems, words, config_dirs, asked), words, root, config_dirs)


def _examine(trainer: Any, look_s: float) -> Findings:
    from drivetrain.measure.profile.step import examine

    return examine(trainer, look_s)


def _share_of_a_rank(job: Job, ranks: int) -> list[str]:
    """What makes the run that of one rank by itself: its samples, its threads."""
    threads = job.run.runtime.threads or max(1, usable_cores() // ranks)
    samples = job.run.batch.size(0) // job.run.parallel.data_ranks()
    return ["parallel=single", f"batch.global_batch={samples}", f"runtime.threads={threads}"]


def _communication(words: Sequence[str], share: Sequence[str], config_dirs: Sequence[str], asked: Settings) -> float:
    """Milliseconds that an update takes longer among all ranks than by itself: gradients shared, waiting, cores and memory."""
    arms = [compare.entry("one rank by itself", over(words, share, config_dirs), config_dirs)]
    arms.append(compare.entry("all ranks", words, config_dirs))
    alone, among = compare.measure(arms, compare.Settings(rounds=LOOKS, turn_s=asked.turn_s), words).rows
    if alone.step_ms_p50 is None or among.step_ms_p50 is None:
        raise UserError(f"the ranks cannot be looked at: {alone.error or among.error}")
    return max(0.0, among.step_ms_p50 - alone.step_ms_p50)


def _show(found: Findings, problems: list[Problem], said: list[str]) -> None:
    total = sum(found.phases.values())
    rows = [(name, f"{ms:.2f} ms", f"{ms / total:.0%}") for name, ms in found.phases.items()]
    rows += [(name, f"{share * found.step_ms:.2f} ms", f"{share:.0%}") for name, share in found.occupied.items()]
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
        return compare.entry(label, over(words, more, config_dirs), config_dirs, own=())

    base = entry("as it is", [])
    entries = [e for t in tries if (e := entry(t, t.split())).job is not None]
    if not entries:
        print("\nno override is known to help with that")
        return []
    print(f"\ntrying {len(entries)} overrides")
    measured = compare.Settings(rounds=asked.rounds, turn_s=asked.turn_s)
    done = compare.measure([base, *entries], measured, words, no_gain)
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
    """The best as a command and a recipe."""
    if not won:
        print("\nnothing that was tried is faster beyond doubt: the run stays as it is")
        return DONE
    label, row, base = won[0]
    prescribe.prescribe("doctor", words, label.split(), config_dirs, base, row, directory.create(root, "doctor"))
    return DONE
