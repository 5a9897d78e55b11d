"""Where a run's recipe comes from and what it came to, as comments: for a reader, and no part of the recipe."""

from __future__ import annotations

from pathlib import Path

from drivetrain.measure.claims.write import commented
from drivetrain.run import reader
from drivetrain.run.reader import RunFiles


def of(run_dir: Path) -> str:
    """Comment lines: the run, its device and versions, its commit, its result, as far as its files say."""
    run = reader.read(run_dir)
    facts = run.environment
    device = (run.result and run.result.device_name) or facts.get("processor")
    versions = [f"{name} {version}" for name, version in (facts.get("versions") or {}).items() if version]
    commit = facts.get("git_commit")
    lines = [
        f"of the run {run_dir.resolve().parent.name}/{run_dir.resolve().name}, drivetrain {facts.get('drivetrain', '–')}",
        f"on {device}, python {facts.get('python', '–')}" if device else "",
        ", ".join(versions),
        f"commit {commit}" if commit else "",
        f"result: {', '.join(result(run))}",
    ]
    return commented([line for line in lines if line])


def result(run: RunFiles) -> list[str]:
    """What the run came to, each figure with its name."""
    said, r, final, best = [run.status], run.result, run.final(), run.best()
    if run.metric is not None and final is not None:
        said.append(f"{run.metric[0]} {final:.4f}" + (f" (best {best:.4f})" if best is not None else ""))
    if r is not None:
        said += [f"{r.samples_per_second:,.0f} samples/s"] if r.samples_per_second else []
        said.append(f"{r.updates:,} updates in {r.wall_s:.1f} s")
    return said
