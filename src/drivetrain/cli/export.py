"""`drivetrain export`: the weights of a run as one plain file, however many ranks wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import DONE, UserError
from drivetrain.core.overrides import key_of
from drivetrain.run.result import Result
from drivetrain.saving import manifest

HELP = """\
drivetrain export RUN [FILE] [key=value]      a run's weights in one plain safetensors file, under the model's own names

  drivetrain export outputs/2026-11-21/07-37-57-4262f6
  drivetrain export outputs/2026-11-21/07-37-57-4262f6 best.safetensors update=best

  FILE                  the file to write; default: RUN/model.safetensors
  update=N              the checkpoint of this update, or best: that of the best evaluation; default: the newest valid one
  average=true          the averaged weights (ema=ema) instead of the trained ones

A checkpoint that each rank wrote its part of (saving.sharded=true) gives the same file as a whole one.
"""


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain export`; its exit code."""
    if not argv or {"-h", "--help"}.intersection(argv):
        print(HELP)
        return DONE
    settings = [word for word in argv if "=" in word and "/" not in word.partition("=")[0]]
    paths = [Path(word).expanduser() for word in argv if word not in settings]
    given = {key_of(word): word.partition("=")[2] for word in settings}
    wrong = [
        f"{k}={v}: drivetrain export knows update=N, update=best and average=true" for k, v in given.items() if not _known(k, v)
    ]
    if not 1 <= len(paths) <= 2:
        wrong.append("drivetrain export needs a run's directory, and perhaps a file: drivetrain export RUN [FILE]")
    if wrong:
        raise UserError(wrong)
    run_dir, file = paths[0], paths[1] if len(paths) > 1 else paths[0] / "model.safetensors"
    checkpoint = _checkpoint(run_dir, given.get("update"))
    weights = _weights(checkpoint, given.get("average") == "true")
    import safetensors.torch

    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.writing")
    safetensors.torch.save_file(weights, temporary, metadata={"update": checkpoint.name})
    temporary.rename(file)
    print(f"{len(weights)} tensors of update {checkpoint.name}: {file}")
    return DONE


def _known(key: str, value: str) -> bool:
    return (key == "update" and (value == "best" or value.isdecimal())) or (key == "average" and value in ("true", "false"))


def _checkpoint(run_dir: Path, update: str | None) -> Path:
    """The checkpoint of an update, of the best evaluation, or the newest valid one. Raises UserError."""
    saved = sorted(int(p.name) for p in manifest.checkpoints(run_dir))
    if not saved:
        raise UserError(f"{run_dir} has no checkpoint: name a run's directory, such as outputs/<date>/<time>-<id>")
    if update is None:
        found, complaints = manifest.newest_valid(run_dir)
        if found is None:
            raise UserError(complaints)
        return found
    if update == "best":
        result = Result.read(run_dir)
        best = (result.metrics.get("best") or {}) if result is not None else {}
        update = str(int(best.get("update", -1)))
    chosen = run_dir / "checkpoints" / update
    if int(update) not in saved:
        raise UserError(f"{run_dir} has no checkpoint of update {update}: it has those of {', '.join(map(str, saved))}")
    if (wrong := manifest.verify(chosen)) is not None:
        raise UserError(f"checkpoint {chosen} {wrong}")
    return chosen


def _weights(checkpoint: Path, average: bool) -> dict[str, Any]:
    from drivetrain.saving import checkpoint_io

    weights, state = checkpoint_io.load(checkpoint)
    if average:
        if not state["ema"]:
            raise UserError(f"{checkpoint} has no averaged weights: the run had ema=none")
        weights = {**weights, **{n: t.to(weights[n].dtype) for n, t in state["ema"]["tensors"].items()}}
    return {name: t.contiguous() for name, t in weights.items()}
