"""loss=ctc: sequences of classes without positions, such as the letters of a line of handwriting."""

from __future__ import annotations

from drivetrain.core.lazy import torch
from drivetrain.core.machine.device import sum_dtype
from drivetrain.core.step.trees import Tree, shape_of
from drivetrain.loss.base import Loss, wide
from drivetrain.loss.classification import IGNORE


class Ctc(Loss):
    """Connectionist temporal classification (Graves et al. 2006), as torch.nn.CTCLoss: sequences without given positions in time.

    The outputs are (n, time, classes + 1), and the last one is the blank. Targets are class numbers (n, length), filled up by
    negative numbers such as -100, which data.pad does. A sample's loss is divided by the length of its target; the mean is over
    samples. A target that does not fit into the time has an infinite loss, which ends the run; with `zero_infinity` it counts
    0. Evaluations report the share of sequences that are right as a whole, decoded from the likeliest output at each time.
    """

    changes = "learns sequences without given positions in time"
    metrics = ("loss", "accuracy")
    best = ("accuracy", max)
    takes = ("sequence",)
    step_waits = "torch's CTC loss reads the lengths of the targets on the host"
    needs_real_tensors = "the lengths of its targets are read on the host"

    def __init__(self, zero_infinity: bool = False) -> None:
        self.zero_infinity = zero_infinity

    def outputs(self, classes: int) -> int:
        return classes + 1

    def problem(self, target: Tree, classes: int) -> str | None:
        if target.is_floating_point() or target.dim() != 2:
            return f"are {target.dtype} of shape {shape_of(target)}; the loss takes class numbers (n, length)"
        if (highest := int(target.max())) >= classes - 1:
            return f"have the class {highest}, and the model has {classes - 1} without the blank: set their number (data.classes)"
        return None

    def output_problem(self, output: tuple[int, ...], classes: int) -> str | None:
        return None if len(output) == 3 and output[2] == classes else f"outputs of shape {output} for (n, time, {classes})"

    def sum_and_count(self, output: torch.Tensor, target: Tree) -> tuple[torch.Tensor, torch.Tensor]:
        log_p, lengths = wide(output).log_softmax(2), (target >= 0).sum(1)
        losses = torch.nn.functional.ctc_loss(
            log_p.transpose(0, 1), target.clamp(min=0), torch.full_like(lengths, output.shape[1]), lengths,
            blank=output.shape[2] - 1, reduction="none", zero_infinity=self.zero_infinity,
        )  # fmt: skip
        return (losses / lengths.clamp(min=1)).sum(), self.count(target).to(losses.dtype)

    def sums(self, output: torch.Tensor, target: Tree) -> torch.Tensor:
        """Sums of the loss and of the sequences that are right, and the number of samples (3,)."""
        total, count = self.sum_and_count(output, target)
        width, dtype = max(target.shape[1], output.shape[1]), sum_dtype(output.device)
        wanted = torch.nn.functional.pad(
            target.long().masked_fill(target < 0, IGNORE), [0, width - target.shape[1]], value=IGNORE
        )
        right = (decoded(output, width) == wanted).all(1).sum()
        return torch.stack([total.to(dtype), right.to(dtype), count.to(dtype)])


def decoded(output: torch.Tensor, width: int) -> torch.Tensor:
    """The sequences of the likeliest outputs (n, width), without repetitions and blanks, filled up by IGNORE."""
    path = output.argmax(2)
    kept = path != output.shape[2] - 1
    kept[:, 1:] &= path[:, 1:] != path[:, :-1]
    places = torch.where(kept, kept.cumsum(1) - 1, width)  # dropped ones go to a column that is cut off
    return torch.full((len(path), width + 1), IGNORE, device=path.device).scatter(1, places, path)[:, :-1]
