"""`drivetrain doctor`: where a step's time goes, the one thing that is wrong, and the overrides that are proven to help."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from drivetrain import rundir, terminal
from drivetrain.cores import usable_cores
from drivetrain.errors import DONE, UserError
from drivetrain.job import Job
from drivetrain.job import prepare as prepare_job
from drivetrain.measure import compare, settings
from drivetrain.measure.compare import Entry, Row
from drivetrain.measure.progress import Steps
from drivetrain.spec import Count, Positive
from drivetrain.words import key_of

LATE, OFTEN, LOOP, MADE = 0.2, 0.1, 0.1, 0.05  # shares of the time from which on something is worth a word
MANY = 64  # operations of one line in one update: a loop over elements
ROOM = 1.5  # times as many samples a second with a larger batch: the device is not filled
READS = 0.005  # what a read of the device weighs beside other findings, on a CPU where it costs nothing


@dataclass
class Settings:
    """What the command itself can be told."""

    look_s: Positive = 2.0  # at the step, in each of several ways
    rounds: Count = 8
    turn_s: Positive = 0.4
    prove: bool = True  # try the overrides; false: only look


@dataclass
class Problem:
    """One thing that costs time."""

    share: float  # of the whole run's time that it takes, or could be had
    name: str  # of its kind
    verdict: str
    evidence: str
    overrides: tuple[str, ...] = ()  # each a set of words that could help, separated by blanks


def command(argv: list[str], config_dirs: Sequence[str] = ()) -> int:
    """`drivetrain doctor`; its exit code."""
    asked, words = settings.split(argv, Settings)
    job = prepare_job([*words, "resume=null"], config_dirs)
    said = []
    if job.run.parallel.distributed:
        said.append("looked at on one rank: what the ranks cost each other is for `drivetrain compare parallel=single,ddp`")
        job = prepare_job([*words, "resume=null", "parallel=single"], config_dirs)
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


def _examined(job: Job, root: Path, look_s: float) -> Any:
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


def diagnose(found: Any, job: Job) -> Iterator[Problem]:
    """What costs time, each with its share, its evidence and what could help."""
    yield from _data(found, job)
    yield from _saving(found, job)
    own = list(_lines(found))
    yield from own
    if all(problem.share < MADE for problem in own):  # what they cost does not grow with the batch either
        yield from _batch(found, job)
    yield from _compute(found, job)


def _data(found: Any, job: Job) -> Iterator[Problem]:
    cores, loader, choice = usable_cores(), job.run.loader, job.run.choices["loader"]
    wait = found.phases["data wait"] / sum(found.phases.values())
    reading = f"; reading a batch of {found.micro_batch} takes {found.read_ms:.1f} ms" if found.read_ms is not None else ""
    workers = getattr(loader, "num_workers", 0)
    if workers > cores:
        yield Problem(
            max(wait, LATE), "workers", f"{workers} loader workers share {cores} cores with the step",
            f"loader.num_workers={workers}; the step waits {wait:.0%} of its time{reading}",
            (f"loader.num_workers={cores}", f"loader.num_workers={max(1, cores // 2)}", "loader=threads", "loader=sync"),
        )  # fmt: skip
    elif wait > LATE:
        own = [line for line in found.lines if line.of_data and line.share > LATE / 2]
        where = f"; most of it in {own[0].place}" if own else ""
        tries = [f"loader={kind}" for kind in ("threads", "workers", "resident") if kind != choice]
        tries += [f"loader.num_workers={cores}"] if 0 < workers < cores else []
        tries += [f"loader=workers loader.num_workers={2 * cores}"]  # for readers that sleep and do not compute
        yield Problem(
            wait, "data", f"the step waits for data {wait:.0%} of its time", f"{job.run.named('loader')}{reading}{where}",
            tuple(tries),
        )  # fmt: skip


def _saving(found: Any, job: Job) -> Iterator[Problem]:
    epoch_s = found.updates * found.step_ms / 1e3
    every = getattr(job.run.saving, "every_updates", None)
    if found.saving_s is not None and every is not None:
        share = found.saving_s / (found.saving_s + every * found.step_ms / 1e3)
        if share > OFTEN:
            yield Problem(
                share, "saving", f"saving takes {share:.0%} of the time",
                f"saving.every_updates={every}: a checkpoint takes {1e3 * found.saving_s:.0f} ms, {every} updates "
                f"{every * found.step_ms:.0f} ms",
                ("saving.every_updates=null saving.every_minutes=10",),
            )  # fmt: skip
    evaluation = found.evaluation_s / job.run.values["evaluate_every"]
    share = evaluation / (evaluation + epoch_s)
    if share > LATE:
        yield Problem(
            share, "evaluation", f"evaluation takes {share:.0%} of the time",
            f"{found.evaluation_s:.1f} s after every {job.run.values['evaluate_every']} epochs of {epoch_s:.1f} s: a larger "
            "evaluate_every spends less, and is for you to weigh",
        )  # fmt: skip


def _lines(found: Any) -> Iterator[Problem]:
    """Lines of the user's own code."""
    computing = sum(found.phases.get(name, 0.0) for name in ("forward", "loss", "backward")) / sum(found.phases.values())
    for line in (line for line in found.lines if not line.of_data):
        made = sum(line.made.values()) / found.step_ms
        # Its backward has no line of its own: there each operation counts alike.
        share = max(line.share, computing * line.operations / found.operations)
        if line.small >= MANY and share > LOOP:
            yield Problem(
                share, "loop", "a Python loop over elements takes the time", f"{line.place}: {line.operations} operations and "
                f"about {share:.0%} of the step: one operation on whole tensors instead (gather, cumsum, bucketize, einsum)",
            )  # fmt: skip
        elif made > MADE:
            names = ", ".join(f"torch.{name}" for name in line.made)
            where = "on the CPU" if found.device == "cuda" else "anew in each step"
            yield Problem(
                made, "made", f"tensors are made {where}", f"{line.place}: {names}, {sum(line.made.values()):.1f} ms and "
                f"{made:.0%} of the step: say device=… where it is made, make it once, or draw fewer",
            )  # fmt: skip
        elif line.reads:
            yield Problem(
                max(line.share if found.device == "cuda" else 0.0, READS), "sync", "the step reads a value back from the device",
                f"{line.place}: {line.reads} times an update; each makes the host wait for the device: keep it a tensor, and "
                "read it every hundred updates",
            )  # fmt: skip


def _batch(found: Any, job: Job) -> Iterator[Problem]:
    if found.larger is not None and found.larger > ROOM:
        size = job.run.batch.size(0)
        yield Problem(
            (1 - 1 / found.larger) / 2, "batch", "the batch is too small to fill the device",
            f"four times {found.micro_batch} samples at once go {found.larger:.1f} times as fast: what a step costs besides "
            "computing outweighs it",
            (f"batch.global_batch={4 * size}", "compile=step", "compile=inductor", "optimizer.fused=true"),
        )  # fmt: skip


def _compute(found: Any, job: Job) -> Iterator[Problem]:
    """What is left when nothing is wrong."""
    choices = job.run.choices
    top = max((k for k in found.phases if k != "data wait"), key=lambda k: found.phases[k])
    tries = []
    if choices["precision"] == "fp32":
        tries.append("precision=bf16")
    if "channels_last" not in choices["surgery"]:
        tries.append(f"surgery=[{','.join([*choices['surgery'], 'channels_last'])}]")
    if choices["compile"] == "none":
        tries.append("compile=inductor")
    if choices["checkpointing"] != "none":
        tries.append("checkpointing=none")
    if len(tries) > 1 and choices["precision"] == "fp32" and "channels_last" not in choices["surgery"]:
        tries.append(f"{tries[0]} {tries[1]}")
    yield Problem(
        READS / 2, "compute", f"nothing is in its way: it computes, most of all the {top}", reached(found), tuple(tries)
    )


def reached(found: Any) -> str:
    """How near the step comes to what the device can do."""
    flops, bandwidth, step = found.roofline
    text = f"this device: {flops / 1e12:.2f} TFLOP/s of matrix products, {bandwidth / 1e9:.0f} GB/s of copying"
    if step:
        rate = step / (found.step_ms / 1e3)
        text += f"; the step: {step / 1e9:.2f} GFLOP, {rate / 1e12:.3f} TFLOP/s, {rate / flops:.0%} of it"
    return text


def _show(found: Any, problems: list[Problem], said: list[str]) -> None:
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


def prove(problems: list[Problem], words: list[str], config_dirs: Sequence[str], asked: Settings) -> list[tuple[str, Row]]:
    """Try what could help against the run as it is, then what won together; the winners, the best first."""
    tries = list(dict.fromkeys(t for problem in problems for t in problem.overrides))
    base = _entry("as it is", words, [], config_dirs)
    entries = [e for t in tries if (e := _entry(t, words, t.split(), config_dirs)).job is not None]
    if not entries:
        print("\nno override is known to help with that")
        return []
    print(f"\ntrying {len(entries)} overrides")
    measured = compare.Settings(rounds=asked.rounds, turn_s=asked.turn_s)
    done = compare.measure([base, *entries], measured, words)
    compare.show(done)
    won = [(r.label, r) for r in done.rows[1:] if r.ratio is not None and r.ratio.low > 1]
    won.sort(key=lambda pair: -pair[1].ratio.middle)  # type: ignore[union-attr]
    together = _together([label for label, _ in won])
    if len(together.split()) > len(won[0][0].split()) if won else False:
        entry = _entry(together, words, together.split(), config_dirs)
        if entry.job is not None:
            print("\ntogether")
            done = compare.measure([base, _entry(won[0][0], words, won[0][0].split(), config_dirs), entry], measured, words)
            compare.show(done)
            best, both = done.rows[1].ratio, done.rows[2].ratio
            if both is not None and best is not None and both.low > 1 and both.middle > best.middle:
                won.insert(0, (together, done.rows[2]))
    return won


def _entry(label: str, words: Sequence[str], more: Sequence[str], config_dirs: Sequence[str]) -> Entry:
    try:  # with the run's own saving: it may be what is wrong
        return Entry(label, [*words, *more], prepare_job([*words, *more, "resume=null"], config_dirs))
    except UserError as error:
        return Entry(label, [*words, *more], None, error.problems)


def _together(labels: Sequence[str]) -> str:
    """The winners' words at once; of those that set the same key, or another option's knobs, the better one's."""
    taken: dict[str, str] = {}
    for label in labels:
        keys = [word.partition("=")[0] for word in label.split()]
        if not {k.split(".")[0] for k in keys} & {k.split(".")[0] for k in taken}:
            taken |= {word.partition("=")[0]: word for word in label.split()}
    return " ".join(taken.values())


def _prescribe(won: list[tuple[str, Row]], words: list[str], root: Path, config_dirs: Sequence[str]) -> int:
    """The best as a command and a recipe; the user's own code and paths, which no recipe may hold, stay words."""
    if not won:
        print("\nnothing that was tried is faster beyond doubt: the run stays as it is")
        return DONE
    from drivetrain import check, replay

    label, row = won[0]
    assert row.ratio is not None
    gain = f"{row.ratio.middle:.2f} × the samples a second ({row.ratio.low:.2f} to {row.ratio.high:.2f})"
    dirs = [part for folder in config_dirs for part in ("-cd", str(folder))]
    print(f"\n{gain}:\n  drivetrain train {shlex.join([*dirs, *words, *label.split()])}")
    job = prepare_job([*words, *label.split()], config_dirs)
    shipped = check.shipped_targets()
    plain = job.composed.plain
    own = {g for g, option in job.composed.choices.items() if option == "own" or _target(plain.get(g)) not in {None, *shipped}}
    folder = rundir.create(root, "doctor")
    text = f"# drivetrain doctor: {label} gives {gain}, measured in turns with the run as it was\n"
    (folder / "recipe.yaml").write_text(text + replay.to_recipe(job.composed, job.operators | own))
    mine = [w for w in words if key_of(w).split(".")[0] in own or key_of(w) in job.operators]
    print(f"  drivetrain train {shlex.join([*dirs, f'recipe={folder}/recipe.yaml', *mine])}")
    return DONE


def _target(section: Any) -> str | None:
    """The class of an option; None for a list of them, and for none."""
    return section.get("_target_") if isinstance(section, dict) else None
