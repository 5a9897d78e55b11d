"""The value `callbacks`: functions and classes of trusted packages by dotted name, and callbacks registered by plugins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from drivetrain.config import plugins
from drivetrain.config.other_tools import suggestion
from drivetrain.core.errors import UserError
from drivetrain.core.options.option import RunSpec
from drivetrain.core.typed import JsonMapping
from drivetrain.core.user import code as user_code
from drivetrain.core.user.call import UserCall
from drivetrain.core.user.callback import Callback, Event

EVENTS = ("start", "update", "evaluation", "save", "end")


def trust_problems(values: JsonMapping) -> Iterator[str]:
    """Yield the names that may not be imported, without importing one."""
    registered = _registered()
    for name in values["callbacks"]:
        if "." not in name and name not in registered:
            yield (
                f"callbacks=[{name}] is no dotted name, such as my_pkg.Watch, and no callback that a plugin has registered: "
                f"{suggestion(f'callbacks={name}', name, registered)}"
            )
        elif "." in name:
            yield from user_code.trust_problems(f"callbacks=[{name}]", name, plugins.trusted_packages().union(values["trust"]))


def problems(run: RunSpec) -> Iterator[str]:
    """Yield the problems of the callbacks themselves. Imports them."""
    for name in run.values["callbacks"]:
        try:
            made = load(name)
        except UserError as error:
            yield from error.problems
            continue
        if made.needs_model and run.parallel.lockstep_evaluation:
            yield (
                f"callbacks=[{name}] needs the model, but each rank holds only a part of it with {run.named('parallel')}: "
                "set needs_model = False in the class, or parallel=ddp"
            )


@dataclass(frozen=True)
class Told:
    """A user's callback: its function for each event gets the event or, if it names `model`, the named arguments."""

    calls: Mapping[str, UserCall]
    every_update: bool = False
    needs_model: bool = False

    @classmethod
    def of(cls, setting: str, functions: Mapping[str, Callable[..., object]], watcher: type[Callback] | Callback) -> Told:
        """Look up the named arguments of the functions for these events. Raises UserError."""
        calls = {
            event: UserCall(setting, function, offers=("event", "model"), positions=("event",), decides=("model",))
            for event, function in functions.items()
        }
        needs_model = watcher.needs_model or any("model" in call.needs for call in calls.values())
        return cls(calls, watcher.every_update, needs_model)

    def tell(self, name: str, event: Event, model: Any) -> None:
        """Call the function for an event."""
        if call := self.calls.get(name):
            call(event=replace(event, model=model) if self.needs_model else event, model=model)


def load(name: str) -> Told:
    """Make a callback. Raises UserError."""
    try:
        target = _registered()[name] if "." not in name else name.replace(":", ".")
        found = user_code.import_name(target)
    except Exception as error:  # the module may raise anything
        raise UserError(f"callbacks=[{name}] cannot be imported: {type(error).__name__}: {error}") from None
    if not callable(found) and not isinstance(found, Callback):
        raise UserError(
            f"callbacks=[{name}] is {type(found).__name__}: name a function of an event, or a class derived from "
            "drivetrain.Callback"
        )
    if inspect.isfunction(found) and inspect.signature(found).parameters:
        return Told.of(f"callbacks=[{name}]", {"evaluation": found}, Callback)
    try:
        made = found if isinstance(found, Callback) else found()
    except Exception as error:
        raise UserError(
            f"callbacks=[{name}] cannot be made: {type(error).__name__}: {error} (it is called without arguments)"
        ) from None
    if not isinstance(made, Callback):
        raise UserError(f"callbacks=[{name}] makes {type(made).__name__}: derive your class from drivetrain.Callback")
    return Told.of(f"callbacks=[{name}]", {event: getattr(made, event) for event in EVENTS}, made)


def _registered() -> dict[str, str]:
    """Return the callbacks of installed plugins: name → dotted name."""
    return {entry.name: entry.value.replace(":", ".") for entry in plugins.entry_points(plugins.CALLBACKS)}
