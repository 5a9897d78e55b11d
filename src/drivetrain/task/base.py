"""The tasks. A task sets the values of the mapping `preset` in its file; its class checks that the other settings fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from drivetrain.core.options import groups
from drivetrain.core.options.option import Option, RunSpec
from drivetrain.core.step.target_kinds import describe


class Task(Option, groups.Task):
    """task=classification, and the base of the others: data, loss and metrics say themselves what they take."""

    changes = "poses another problem, with options and values that suit it"
    why_fixed: ClassVar[str] = "a run has one task"
    tokens: ClassVar[bool] = False  # whether the inputs must be sequences of tokens
    fitting_data: ClassVar[str] = ""  # data that has such targets, for messages

    def validate(self, run: RunSpec) -> Iterator[str]:
        """Refuse data with other targets or inputs. Losses and metrics refuse data that they do not take themselves."""
        name, data, given = run.named("task"), run.named("data"), run.data.targets
        if self.targets and given is not None and given not in self.targets:
            yield (
                f"{name} wants {describe(self.targets)}, but {data} has {describe((given,))}: set data={self.fitting_data}, or "
                "another task"
            )
        elif self.tokens and run.data.tokens is False:
            remedy = run.data.text_remedy or f"set data={self.fitting_data}, or another task"
            yield f"{name} wants sequences of tokens, which {data} does not give: {remedy}"


class Multilabel(Task):
    """Any number of labels for each sample."""

    targets = ("labels",)
    fitting_data = "digit_scenes"


class RegressionTask(Task):
    """Numbers for each sample."""

    targets = ("values",)
    fitting_data = "diabetes"


class Segmentation(Task):
    """A class for each pixel."""

    targets = ("mask",)
    fitting_data = "digit_scenes"


class LanguageModelling(Task):
    """The next token at each position."""

    targets = ("tokens",)
    tokens = True
    fitting_data = "stdlib"


class Instruction(Task):
    """Answers to instructions: the next token at each position of an answer."""

    targets = ("tokens",)
    tokens = True
    fitting_data = "instructions"
    writes_answers = True

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if not run.data.has_prompts:
            yield f"task=instruction wants prompts and answers, which {run.named('data')} has not: set data=instructions"

    def advise(self, run: RunSpec) -> Iterator[str]:
        if run.model.generates is False:
            yield (
                f"{run.named('model')} learns answers and cannot write any: `drivetrain predict` will refuse the run; for one "
                "that answers, set model=transformers"
            )


class TextClassification(Task):
    """One class for each text."""

    targets = ("class",)
    tokens = True
    fitting_data = "stdlib"


class ContrastiveTask(Task):
    """Two views of each sample, which the model learns to recognise among the views of others."""

    targets = ("pair",)
    fitting_data = "digits"

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        if run.data.views > 1 and not run.names("augment"):
            yield (
                "task=contrastive makes two views of a sample by augmenting it twice, and with augment=[] both are the same: set "
                "augment=[random_resized_crop], or others"
            )
