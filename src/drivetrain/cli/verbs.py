"""The verbs of the command line. A verb's module is imported only when the verb runs.

A new verb costs one module with `command(argv) -> int` and one row below; a measuring verb costs a row here and one in
measuring.py. Another package adds a verb by an entry point in the group `drivetrain.verbs`, such as `hello =
"my_pkg.hello:command"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from drivetrain.config import plugins
from drivetrain.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Verb:
    """One verb and the place of its function."""

    name: str
    target: str  # "module:function"; the function takes the arguments after the verb and returns the exit code
    help: str  # one line of `drivetrain help`; "" keeps the verb out of it

    def run(self, argv: list[str]) -> int:
        """Run the verb; its exit code. Raises UserError if a plugin's verb cannot be imported or returns no exit code."""
        module, function, name = self._found()
        if not callable(function):
            raise UserError(f"the verb {self.name} is {self.target}, but {module.__name__} has no function '{name}'")
        code = function(argv)
        if not isinstance(code, int):
            raise UserError(f"the verb {self.name} returned {code!r}: {self.target} must return an exit code, 0 if all went well")
        return code

    def complete(self, words: list[str], last: str) -> list[str]:
        """The completions of `last`, by `complete(words, last)` of the function or its module, if defined."""
        module, function, _ = self._found()
        complete = getattr(function, "complete", None) or getattr(module, "complete", None)
        return list(complete(words, last)) if complete is not None else []

    def _found(self) -> tuple[ModuleType, Any, str]:
        """The module, its function or None, and the function's name."""
        place, _, name = self.target.partition(":")
        try:
            module = import_module(place)
        except (Exception, SystemExit) as error:
            if self.name in VERBS:  # one of ours: a bug
                raise
            raise UserError(f"the verb {self.name} ({self.help}) cannot be imported from {place}: {error}") from None
        return module, getattr(module, name or "command", None), name or "command"


_ROWS = (
    Verb("train", "drivetrain.cli.train:command", "train what the config says"),
    Verb("list", "drivetrain.cli.list:command", "every option of every group, or of one, with its description"),
    Verb(
        "compare", "drivetrain.cli.measuring:compare",
        "techniques side by side in turns: what each brings and costs, and whether the result is still right",
    ),
    Verb(
        "certify", "drivetrain.cli.measuring:certify",
        "is this the same mathematics? A few updates next to a plain run and to float64, and where they differ",
    ),
    Verb(
        "ablate", "drivetrain.cli.measuring:ablate",
        "what each technique of a recipe brings alone, and what leaving it out costs",
    ),
    Verb(
        "bisect", "drivetrain.cli.measuring:bisect",
        "which of the settings in which two configs differ makes one slower, or worse",
    ),
    Verb(
        "doctor", "drivetrain.cli.measuring:doctor",
        "where a step's time goes, what is wrong, and which overrides are proven to help",
    ),
    Verb(
        "tune", "drivetrain.cli.measuring:tune",
        "what makes a run faster on this machine: found by measuring, kept where it is proven",
    ),
    Verb("forecast", "drivetrain.cli.measuring:forecast", "peak memory, time and limits of a run, before it is started"),
    Verb("rehearse", "drivetrain.cli.measuring:rehearse", "will it survive? One of everything that a run does, small, first"),
    Verb("replay", "drivetrain.cli.measuring:replay", "what happened at an update of a run: a sample, a layer, or the rate?"),
    Verb("report", "drivetrain.cli.measuring:report", "any runs in one table, CSV and page with plots"),
    Verb(
        "show", "drivetrain.cli.show:command",
        "preview the training data and the learning rate",
    ),
    Verb("recipe", "drivetrain.cli.recipe:command", "list, show, check, export, verify or diff recipes"),
    Verb("evaluate", "drivetrain.cli.finished:evaluate", "the metrics of a finished run, on any data, device and ranks"),
    Verb("predict", "drivetrain.cli.finished:predict", "a finished run's predictions for new inputs, as a table"),
    Verb(
        "export", "drivetrain.cli.finished:export",
        "a finished run as a file to use without drivetrain: safetensors, ONNX, torch.export, TorchScript",
    ),
    Verb("card", "drivetrain.cli.finished:card", "a model card of a finished run: README.md as Hugging Face's hub shows it"),
    Verb("pack", "drivetrain.cli.pack:command", "decode images once, for data=packed"),
    Verb("completion", "drivetrain.cli.completion:command", "TAB completion for bash, zsh or fish"),
    Verb("complete", "drivetrain.cli.completion:print_candidates", ""),
)  # fmt: skip
VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _ROWS}

ELSEWHERE = {  # words of other tools → ours
    "fit": "train", "run": "train", "launch": "train",
    "sweep": "train -m key=a,b", "search": "train -m hydra/sweeper=optuna …", "resume": "train resume=RUN",
    "test": "evaluate RUN", "validate": "evaluate RUN split=validation", "infer": "predict RUN INPUT …",
    "benchmark": "compare", "profile": "doctor", "lr_find": "tune", "plot": "report",
}  # fmt: skip


def all_verbs() -> dict[str, Verb]:
    """Name → verb: drivetrain's own, then those of plugins. No module is imported."""
    found = dict(VERBS)
    for entry in plugins.entry_points(plugins.VERBS):
        owner = entry.dist.name if entry.dist is not None else entry.module
        found.setdefault(entry.name, Verb(entry.name, entry.value, f"from the package {owner}"))
    return found


def find(name: str) -> Verb:
    """The verb of this name. Raises UserError with similar names."""
    if name in VERBS:  # without loading plugins
        return VERBS[name]
    known = all_verbs()
    if name in known:
        return known[name]
    if name in ELSEWHERE:
        hint = f"it is drivetrain {ELSEWHERE[name]} here"
    elif "=" in name:
        hint = f"drivetrain train {name} …"
    else:
        hint = did_you_mean(name, [verb.name for verb in known.values() if verb.help])
    raise UserError(f"there is no command '{name}': {hint}")


def overview(version: str) -> str:
    """The text that `drivetrain help` prints: a line for each verb, and for each plugin's verb whose name is taken."""
    title, known = f"drivetrain {version}: every training technique is one config override, and measured", all_verbs()
    rows = [f"  drivetrain {verb.name:<12} {verb.help}" for verb in known.values() if verb.help]
    taken = [
        f"  not available: {entry.name} from {entry.value}, because another verb has this name\n"
        for entry in plugins.entry_points(plugins.VERBS)
        if known[entry.name].target != entry.value
    ]
    return "\n".join([title, "", *rows, "", *taken, "  drivetrain train --help says more"])
