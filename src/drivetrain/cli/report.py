"""`drivetrain report`: runs and sweeps in one table, one CSV and one page."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.core.errors import DONE
from drivetrain.ui.output import echo, fold

HELP = """\
drivetrain report [RUN | DIR …]      one run on a page; or runs and sweeps, finished or under way, in a table, a CSV and a page

  drivetrain report                                    all below outputs/
  drivetrain report outputs/2026-11-21/…/…             one run, with the samples that it gets most wrong
  drivetrain report outputs/multirun/2026-11-21/…      one sweep
  drivetrain report runs/a runs/b target=0.97 out=page

  target=VALUE          the metric that times are taken to, or 'target=accuracy>=0.98'; default: what all completed runs reached
  samples=12            on the page of one run: the worst samples, and as many others; 0 loads no model
  out=DIR               where report.html and report.csv go; else the folder of the one run, or a new one under outputs/report
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain report`; its exit code."""
    if {"-h", "--help"}.intersection(argv):
        echo(fold(HELP))
        return DONE
    from drivetrain.measure.report import report

    return report.command(argv)
