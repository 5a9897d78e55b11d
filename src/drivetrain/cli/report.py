"""`drivetrain report`: runs and sweeps in one table, one CSV and one page."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.core.errors import DONE
from drivetrain.ui.output import echo, fold

HELP = """\
drivetrain report [DIR …]      any runs and sweeps, finished or under way, in one table, one CSV and one page

  drivetrain report                                    all below outputs/
  drivetrain report outputs/multirun/2026-11-21/…      one sweep
  drivetrain report runs/a runs/b target=0.97 out=page

  target=VALUE          the metric that times are taken to; default: what all completed runs reached
  out=DIR               where report.html and report.csv go; else a new folder under outputs/report
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain report`; its exit code."""
    if {"-h", "--help"}.intersection(argv):
        echo(fold(HELP))
        return DONE
    from drivetrain.measure.report import report

    return report.command(argv)
