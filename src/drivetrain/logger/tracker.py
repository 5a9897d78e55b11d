"""What the experiment trackers share: the run's name and config, and the tracker's own run, which a resume continues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.core.option import RunSpec, needs_extra
from drivetrain.core.paths import expanded
from drivetrain.core.typed import JsonObject, fits
from drivetrain.logger.base import Logger
from drivetrain.saving import manifest

if TYPE_CHECKING:
    from drivetrain.core.context import BuildContext

RUNS = "trackers.json"  # in the run's directory: package of the tracker → id of its run
ANEW = "trackers begin a run of their own"


@dataclass
class TrackedRun:
    """What a tracker is told of a run when it starts."""

    run_dir: Path
    output_dir: Path  # of all runs
    name: str
    config: JsonObject  # by dotted key, without what belongs to this machine
    id: str | None  # of the tracker's own run, where this one is resumed


class Tracker(Logger):
    """A logger that gives the run to a library which shows the runs of many."""

    package = ""  # the library's; its extra has the same name
    name: str | None = None  # of the run in the tracker; None: the run's directory

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from needs_extra(self.package, self.package, f"logger={self.package}")

    def setup(self, context: BuildContext) -> None:
        ids = context.run_dir / RUNS
        known = known_ids(ids)
        output_dir = expanded(context.run.values["output_dir"]).absolute()
        name = self.name or "-".join(context.run_dir.absolute().parts[-2:])
        run = TrackedRun(context.run_dir, output_dir, name, dict(context.config), known.get(self.package))
        write_ids(ids, {**known, self.package: self.open(run)})

    def open(self, run: TrackedRun) -> str:
        """Start the tracker's run, or continue the one named `run.id`. Returns its id."""
        raise NotImplementedError


def write_ids(file: Path, ids: dict[str, str]) -> None:
    """Write the ids of a run's trackers."""
    files.write_text(file, manifest.text(ids))


def known_ids(file: Path) -> dict[str, str]:
    """Read the ids of a run's trackers; {} where it had none. Raises UserError."""
    try:
        written = files.read_text(file)
        found = files.parse_json(written)
        if not fits(found, dict[str, str]):
            raise ValueError(f"it holds {found!r:.80}, and no ids of trackers")
        manifest.check(written, found)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error}): remove it, and {ANEW}") from None
    ids: dict[str, str] = {package: id_ for package, id_ in found.items() if package != manifest.OWN}
    if any(PurePath(id_).is_absolute() or ".." in PurePath(id_).parts for id_ in ids.values()):
        raise UserError(f"{file} holds {ids!r:.80}, and no ids of trackers: remove it, and {ANEW}")
    return ids
