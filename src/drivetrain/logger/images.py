"""logger=[images]: pictures of training samples and of predictions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.core.errors import UserError
from drivetrain.core.lazy import torch
from drivetrain.core.machine import files
from drivetrain.core.options.option import BuildContext, CountOrZero, RunSpec
from drivetrain.core.step.microbatch import Request
from drivetrain.core.typed import JsonObject
from drivetrain.core.user.callback import PLAIN
from drivetrain.logger.base import Logger

if TYPE_CHECKING:
    from drivetrain.logger.drawing import Tile

FOLDER = "images"  # in the run's directory


class ImageLogger(Logger):
    """Draw augmented training samples once, and predictions on the first samples of each evaluation's set."""

    in_thread = False  # it calls the model

    def __init__(self, samples: CountOrZero = 32, predictions: CountOrZero = 32) -> None:
        self.samples, self.predictions = samples, predictions

    def validate(self, run: RunSpec) -> Iterator[str]:
        if run.data.tokens:
            yield f"logger=images draws images, and {run.named('data')} has sequences of tokens: leave it out"
        if self.predictions and run.parallel.lockstep_evaluation:
            yield (
                f"logger=images predicts on rank 0, and with {run.named('parallel')} each rank holds only a part of the model: "
                "set logger.images.predictions=0"
            )

    def setup(self, context: BuildContext) -> None:
        shape = context.data.shape
        if not isinstance(shape, tuple | list) or len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(
                f"logger=images draws images of 1 or 3 channels, and samples of {context.run.named('data')} have the shape "
                f"{shape}: leave it out"
            )
        self._context = context
        self._folder = files.folder_in(context.run_dir, FOLDER)

    def log(self, record: JsonObject) -> None:
        first = self._folder / "samples.png"
        if self.samples and not first.exists():
            self._show("samples", first, self._training_tiles())
        if self.predictions and record["event"] == "evaluate":
            self._show("predictions", self._folder / f"predictions-{record['update']}.png", self._predicted_tiles())

    def _show(self, name: str, path: Path, tiles: list[Tile]) -> None:
        from drivetrain.logger import drawing

        drawing.grid(tiles).save(files.place_for(path))
        self._context.log_image(name, path)

    def _training_tiles(self) -> list[Tile]:
        """The run's first micro-batch, as the model sees it but not normalised."""
        context, pipeline = self._context, self._context.train_data
        request = next(context.batch.requests(context.seed, 0, context.parallel.data_world, False))
        x, y = pipeline.unnormalized()(request)
        return [self._tile(*sample) for sample in zip(x[: self.samples], y[: self.samples], strict=True)]

    def _predicted_tiles(self) -> list[Tile]:
        context, pipeline = self._context, self._context.judging_data
        indices = torch.arange(min(self.predictions, len(pipeline.source)))
        x, y = pipeline.unnormalized()(Request(0, indices, 1.0))
        inputs = pipeline.normalized(x).to(context.device, memory_format=context.memory_format)
        with context.eval_model(PLAIN) as model:
            outputs = model(inputs).float().cpu()
        return [self._tile(*sample) for sample in zip(x, y, outputs, strict=True)]

    def _tile(self, x: torch.Tensor, y: torch.Tensor, output: torch.Tensor | None = None) -> Tile:
        """A sample with its target and, of an evaluated sample, the prediction below it."""
        from drivetrain.logger import drawing

        picture = drawing.pixels(x.cpu().numpy(), self._context.run.data.max_value)
        if y.dim() == 2:  # a mask
            shown = y if output is None else output.argmax(0)
            return drawing.Tile(drawing.with_mask(picture, shown.cpu().numpy()), [])
        kind, names = self._context.run.data.targets, self._context.data.names
        lines = [(line, drawing.BLACK) for line in drawing.in_words(y, kind, names)]
        if output is not None:
            made, right = _predicted(output, y, kind)
            color = drawing.BLACK if right is None else drawing.GREEN if right else drawing.RED
            lines.append((drawing.in_words(made, kind if right is not None else "values", names)[0], color))
        return drawing.Tile(picture, lines)


def _predicted(output: torch.Tensor, y: torch.Tensor, kind: str | None) -> tuple[torch.Tensor, bool | None]:
    """The prediction of an output, and whether it is right; None for a matter of degree."""
    if kind == "labels":
        return (output > 0).float(), bool(((output > 0) == (y > 0.5)).all())
    if kind == "class" or (kind is None and y.dim() == 0 and not y.is_floating_point()):
        return output.softmax(0), bool(output.argmax() == y)
    return output, None
