"""The provenance of an exported recipe, as comments: the run it comes from, its environment, and its result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from drivetrain.measure.claims.write import as_comments
from drivetrain.run import reader
from drivetrain.run.reader import RunFiles


def of(run_dirs: Sequence[Path]) -> str:
    """Comment lines with the first run's name, device, versions, commit and result, and with the names of the others."""
    run, others = reader.read(run_dirs[0]), [_name(folder) for folder in run_dirs[1:]]
    facts = run.environment
    device = (run.result and run.result.device_name) or facts.get("processor")
    recorded = facts.get("versions")
    versions = [f"{name} {version}" for name, version in (recorded if isinstance(recorded, dict) else {}).items() if version]
    commit = facts.get("git_commit")
    lines = [
        f"of the run {_name(run_dirs[0])}, drivetrain {facts.get('drivetrain', '–')}",
        f"on {device}, python {facts.get('python', '–')}" if device else "",
        ", ".join(versions),
        f"commit {commit}" if commit else "",
        f"result: {', '.join(result(run))}",
        f"and of the same with other seeds: {', '.join(others)}" if others else "",
    ]
    return as_comments([line for line in lines if line])


def _name(run_dir: Path) -> str:
    return f"{run_dir.resolve().parent.name}/{run_dir.resolve().name}"


def result(run: RunFiles) -> list[str]:
    """The run's results, each figure with its name."""
    figures, final, best = [run.status], run.final(), run.best()
    if run.metric is not None and final is not None:
        figures.append(f"{run.metric[0]} {final:.4f}" + (f" (best {best:.4f})" if best is not None else ""))
    if run.result is not None:
        rate = run.result.samples_per_second
        figures += [f"{rate:,.0f} samples/s"] if rate else []
        figures.append(f"{run.result.updates:,} updates in {run.result.wall_s:.1f} s")
    return figures
