"""`drivetrain export`: a finished run as one file, to use without drivetrain, however many ranks wrote it."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli import run_arguments
from drivetrain.core.errors import DONE, UserError
from drivetrain.core.paths import expanded
from drivetrain.ui.output import echo

HELP = f"""\
drivetrain export RUN [FILE] [--format FORMAT] [key=value] …      a finished run as one file, to use without drivetrain

  drivetrain export outputs/2026-11-21/07-37-57-4262f6
  drivetrain export outputs/2026-11-21/07-37-57-4262f6 best.safetensors update=best
  drivetrain export outputs/2026-11-21/07-37-57-4262f6 --format onnx
  drivetrain export outputs/2026-11-21/07-37-57-4262f6 model.pt2 --with-normalize

  FILE                  the file to write; default: RUN/model, with the suffix of the format
  --format FORMAT       default: as the suffix of FILE says, else safetensors
                        safetensors (.safetensors): the weights, under the model's own names
                        torch.export (.pt2), onnx (.onnx), torchscript (.ts): the model, in float32, for any batch size
                        transformers: a folder that its from_pretrained reads, of a run with model=transformers
  --adapter             with --format transformers: the adapter alone, as peft has it; else it is merged into the weights
  --with-normalize      the model normalises its inputs itself; else it takes normalised ones
{run_arguments.OF_CHOICE}

The file says in its metadata what is needed to use it: model, classes, shape and normalisation of the inputs. Before it is
kept, its output is compared with the model's. docs/export.md shows how to load each one.
"""


SWITCH = {"action": "store_true"}


def command(argv: Sequence[str]) -> int:
    """Run `drivetrain export`; its exit code."""
    if (given := run_arguments.parse("export", argv, HELP, format={}, with_normalize=SWITCH, adapter=SWITCH)) is None:
        return DONE
    if len(given.paths) > 1:
        raise UserError("drivetrain export needs a run's directory, and perhaps a file: drivetrain export RUN [FILE]")
    from drivetrain.inference import export
    from drivetrain.inference.finished import MODEL_ALONE, ONE_PROCESS, find

    file = expanded(given.paths[0]) if given.paths else None
    kind, with_normalize = export.format_of(file, given.options.format), given.options.with_normalize
    if with_normalize and kind in ("safetensors", "transformers"):
        raise UserError(f"--with-normalize: {kind} holds weights, and no model that could normalise: set another --format")
    if given.options.adapter and kind != "transformers":
        raise UserError("--adapter writes an adapter as peft has it: set --format transformers")
    path = file or given.run_dir / f"model{export.SUFFIX[kind]}"
    overrides = [ONE_PROCESS, "ema=none", "precision=fp32", *given.overrides, "runtime.device=cpu"]
    finished = find("drivetrain export", given.run_dir, overrides, given.config_dirs, given.choice, MODEL_ALONE)
    if kind == "safetensors":
        done = export.export_weights(finished, path)
        echo(f"{done.tensors} tensors of update {finished.checkpoint.name}: {path}")
        return DONE
    from drivetrain.inference.loaded import open_run

    if kind == "transformers":
        from drivetrain.inference import pretrained

        echo(f"update {finished.checkpoint.name} as {kind}: {pretrained.write(finished, path, given.options.adapter)}")
        return DONE
    done = export.export_program(open_run(finished), path, kind, with_normalize)
    checked = f"matches the model's output to {done.difference:.0e}" if done.difference is not None else done.note
    echo(f"update {finished.checkpoint.name} as {kind}: {path} ({checked})")
    return DONE


def complete(words: Sequence[str], last: str) -> list[str]:
    """What TAB offers."""
    return run_arguments.complete(words, last, "--format", "--with-normalize", "--adapter")
