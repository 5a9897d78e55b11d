"""The overview of the verbs; each verb's own help is in its module."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.cli import verbs
from drivetrain.config import plugins


def overview(version: str) -> str:
    """What `drivetrain help` prints: a line for each verb."""
    title = f"drivetrain {version}: every training technique is one config override, and measured"
    rows = [f"  drivetrain {verb.name:<12} {verb.help}" for verb in verbs.all_verbs().values() if verb.help]
    return "\n".join([title, "", *rows, "", *_unused(), "  drivetrain train --help says more"])


def _unused() -> Iterator[str]:
    """A line for each plugin's verb whose name is taken."""
    known = verbs.all_verbs()
    for entry in plugins.entry_points(plugins.VERBS):
        if known[entry.name].target != entry.value:
            yield f"  not available: {entry.name} from {entry.value}, because another verb has this name\n"
