"""Former names of options and keys: they are not accepted, but the answer to them gives the present name."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.core.errors import did_you_mean

RENAMED = {
    "batch.steps": "batch.accumulation_steps",
    "optimizer.lr_of": "optimizer.lr_multipliers",
    "optimizer.no_decay": "optimizer.no_weight_decay",
    "parallel.silent_s": "parallel.heartbeat_timeout_s",
    "debug=sync": "debug=host_sync",
}
SETTINGS = {"turn_s": "block_s", "look_s": "profile_s"}  # of the measuring commands


def suggestion(given: str, name: str, known: Iterable[str]) -> str:
    """What to write instead of `given` (a key, or group=option), whose last part is `name`: its present or a similar name."""
    present = RENAMED.get(given) or SETTINGS.get(given)
    return f"it is called {present} now" if present else did_you_mean(name, known)
