"""loss=distill: a student learns from the outputs of a trained teacher, rebuilt from the files of its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.config import catalog, plugins, recipe_checks, schema
from drivetrain.config.validate import read_config
from drivetrain.core.errors import UserError, refuse
from drivetrain.core.lazy import torch
from drivetrain.core.machine import guards
from drivetrain.core.machine.paths import expanded
from drivetrain.core.options.option import BuildContext, Positive, RunSpec, Share
from drivetrain.core.step import low_rank, streams
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.step.trees import Forward, Tree
from drivetrain.core.user import code as user_code
from drivetrain.loss.base import PartedLoss, too_few, wide
from drivetrain.loss.classification import CrossEntropy
from drivetrain.saving import manifest


class Distill(PartedLoss):
    """Cross entropy, and the divergence from a teacher's softened outputs (Hinton et al. 2015), logged as loss_soft.

    `teacher` is the directory of a run, or a file in one from `drivetrain export`. The teacher gets the student's inputs with the
    same augmentation, and computes without gradients. The loss is (1 − soft) × cross entropy + soft × temperature² × KL.
    """

    changes = "also draws the outputs towards a teacher's"
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
        self.begin(context.device, "hard", "soft")
        self._hard = CrossEntropy(self.label_smoothing)
        path, key = expanded(str(self.teacher)), f"{self.target_key}.teacher"
        with streams.apart():  # so that the student starts from the same weights as without a teacher
            self._teacher = trained_model(path, key, context).to(context.device)

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


def trained_model(path: Path, key: str, context: BuildContext) -> torch.nn.Module:
    """Return the model of a run, or that of an exported file in its directory, in evaluation mode. Raises UserError.

    `path` is a safetensors file, or the run's directory, for its newest valid checkpoint.
    """
    run_dir = path if path.is_dir() else path.parent
    if not (run_dir / "config.yaml").is_file():
        raise UserError(f"{key}={path}: {run_dir} is no run's directory (it has no config.yaml, which names the model)")
    try:
        section = dict(read_config(run_dir / "config.yaml")["model"])
        target = section.pop("_target_")
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{key}={path}: {run_dir / 'config.yaml'} cannot be read, or names no model") from None
    if "pretrained" in section:  # the run's weights follow
        section["pretrained"] = False
    for named in (target, section.get("target")):  # of model=own too
        if named is None or named in catalog.shipped_targets("model"):
            continue
        trusted = {*plugins.trusted_packages(), *context.run.values["trust"]}
        refuse(user_code.trust_problems(f"{key}={path}: its model {named}", str(named), trusted))
    option = user_code.import_name(target)
    refuse(schema.of(option).problems(f"{key}={path}: model", section))
    if keys := sorted(recipe_checks.not_for_recipes({"model": section}, {"model": option})):  # its author is not trusted
        raise UserError(f"{key}={path}: its config.yaml sets {', '.join(keys)} to what no recipe may hold")
    weights = low_rank.merged(_weights(path, key))
    try:
        with guards.model_within(guards.memory_bytes() // context.world.local_size, f"{key}={path}"):
            model: Any = option(**section).create(context.data.shape, context.data.classes)
        model.load_state_dict(weights)
    except RuntimeError as error:
        problem = str(error).splitlines()[-1].strip()
        raise UserError(f"{key}={path}: its weights do not fit this data's shape and classes: {problem}") from None
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]


def _weights(path: Path, key: str) -> dict[str, torch.Tensor]:
    from drivetrain.saving import checkpoint_io

    if path.is_dir():
        checkpoint, problems = manifest.newest_valid(path)
        if checkpoint is None:
            raise UserError(f"{key}={path} has no checkpoint that verifies: {'; '.join(problems) or 'it saved none'}")
        return checkpoint_io.load(checkpoint)[0]
    try:
        return checkpoint_io.read_weights(path)
    except Exception as error:
        raise UserError(f"{key}={path} is no safetensors file: {error}") from None
