"""loss=distill: a student learns from the outputs of a trained teacher."""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.core import streams
from drivetrain.core.lazy import torch
from drivetrain.core.microbatch import MicroBatch
from drivetrain.core.option import BuildContext, Positive, RunSpec, Share
from drivetrain.core.paths import expanded
from drivetrain.core.trees import Forward, Tree
from drivetrain.loss.base import PartedLoss, too_few, wide
from drivetrain.loss.classification import CrossEntropy


class Distill(PartedLoss):
    """Cross entropy, and the divergence from a teacher's softened outputs (Hinton et al. 2015), logged as loss_soft.

    `teacher` is the directory of a run, or the file that `drivetrain export` wrote in one. The teacher sees the student's inputs,
    augmented alike, and computes without gradients. The loss is (1 − soft) × cross entropy + soft × temperature² × KL.
    """

    changes = "also draws the outputs towards those of a teacher"
    machine_local_keys = ("teacher",)
    metrics = CrossEntropy.metrics
    best = CrossEntropy.best
    takes = ("class",)

    def __init__(
        self,
        teacher: str | None = None,
        temperature: Positive = 4.0,
        soft: Share = 0.9,
        label_smoothing: Share = 0.0,
    ) -> None:
        super().__init__()
        self.teacher, self.temperature, self.soft, self.label_smoothing = teacher, temperature, soft, label_smoothing

    def validate(self, run: RunSpec) -> Iterator[str]:
        yield from super().validate(run)
        key = f"{self.target_key}.teacher"
        if not self.teacher:
            yield f"loss=distill needs {key}, a run's directory, such as outputs/<date>/<time>-<id>"
        elif not expanded(self.teacher).exists():
            yield f"{key}={self.teacher}: there is no such run or file"

    def setup(self, context: BuildContext) -> None:
        from drivetrain.loss import teacher

        self.begin(context.device, "hard", "soft")
        self._hard = CrossEntropy(self.label_smoothing)
        path, key = expanded(str(self.teacher)), f"{self.target_key}.teacher"
        with streams.apart():  # the student starts from the same weights as without a teacher
            self._teacher = teacher.load(path, key, context).to(context.device)

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        return too_few(output[1] if len(output) > 1 else 1, classes)

    def step(self, forward: Forward, batch: MicroBatch) -> torch.Tensor:
        with torch.no_grad():
            taught = self._teacher(batch.x)
        output, t = wide(forward(batch.x)), self.temperature
        hard = self._hard(output, batch.y)
        divergence = torch.nn.functional.kl_div(
            (output / t).log_softmax(1),
            (wide(taught).to(output.dtype) / t).log_softmax(1),
            reduction="batchmean",
            log_target=True,
        )
        soft = divergence * t**2
        self.log("hard", hard * batch.weight)
        self.log("soft", soft * batch.weight)
        return (1 - self.soft) * hard + self.soft * soft

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        return self._hard.sums(output, target)
