"""A finished run of model=transformers as a folder that transformers, or peft, reads."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import torch

from drivetrain.adapter import peft_files
from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.data.tokenizer import SETTINGS
from drivetrain.inference import card
from drivetrain.inference.finished import Finished, chosen_weights
from drivetrain.inference.loaded import LoadedRun, open_run
from drivetrain.model.transformers import Transformers
from drivetrain.run import reader
from drivetrain.saving import checkpoint_io

TOLERANCE = 1e-5  # of the largest output


def write(finished: Finished, folder: Path, adapter: bool) -> str:
    """Write the model, merged, or with `adapter` its adapter alone, with the tokenizer and a model card. Raises UserError.

    Return what to print. The folder is kept only if the model that transformers reads from it gives the run's outputs.
    """
    option = finished.job.run.model
    if not isinstance(option, Transformers):
        raise UserError(f"--format transformers is for runs with model=transformers, and this one has {_named(finished)}")
    if adapter and not finished.job.run.adapter.active:
        raise UserError("--adapter: the run has no adapter (adapter=none): leave it out")
    if adapter and not option.began:
        raise UserError(
            "--adapter: the frozen weights of this run began at random, and are in no folder that others have: leave --adapter "
            "out, so that the whole model is written"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name another folder")
    loaded = open_run(finished)
    temporary = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        base = None if Path(str(option.name)).exists() else option.name
        if adapter:
            _write_adapter(finished, loaded, temporary, base)
            checked = f"{folder}"
        else:
            checked = f"{folder} (matches the model's output to {_write_whole(loaded, temporary):.0e})"
        for name in ("tokenizer.json", SETTINGS) if (finished.run_dir / SETTINGS).is_file() else ():
            shutil.copyfile(finished.run_dir / name, temporary / name)
        files.write_text(temporary / "README.md", _card(finished, loaded, base, adapter))
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checked


def _named(finished: Finished) -> str:
    return finished.job.run.named("model")


def _write_whole(loaded: LoadedRun, folder: Path) -> float:
    """Write the model; return the largest difference of outputs from those of what is read again. Raises UserError."""
    model: Any = loaded.model
    model.config.use_cache = True  # switched off for training; who generates wants it
    model.save_pretrained(folder)
    model.config.use_cache = False
    logging.getLogger("transformers").setLevel(logging.ERROR)
    again = type(model).from_pretrained(folder, use_safetensors=True).eval()
    again.config.use_cache = False
    example = loaded.example()
    generator = torch.Generator().manual_seed(0)
    if isinstance(example, torch.Tensor) and example.is_floating_point():
        example = torch.randn(example.shape, generator=generator)
    elif isinstance(example, torch.Tensor):
        example = torch.randint(1, model.config.vocab_size, example.shape, generator=generator)
    arguments = example if isinstance(example, dict) else {model.main_input_name: example}
    with torch.no_grad():
        own, theirs = model(**arguments), again(**arguments).logits
    difference = float((own - theirs).abs().max()) / max(1.0, float(own.abs().max()))
    if not difference <= TOLERANCE:
        raise UserError(f"the folder was not written: its output differs from the model's by {difference:.1e}")
    return difference


def _write_adapter(finished: Finished, loaded: LoadedRun, folder: Path, base: str | None) -> None:
    weights = chosen_weights(finished.checkpoint, *checkpoint_io.load(finished.checkpoint), finished.average)
    run = finished.job.run
    heads = run.adapter.trained_whole(loaded.model, run.model.output_layers(loaded.model))
    peft_files.write(folder, weights, heads, base)


def _card(finished: Finished, loaded: LoadedRun, base: str | None, adapter: bool) -> str:
    """The model card: what a hub shows of the folder, with how to load it."""
    cls = type(loaded.model).__name__
    use = [f"model = transformers.{cls}.from_pretrained(FOLDER)"]
    if adapter:
        use = [f"base = transformers.{cls}.from_pretrained(BASE)", "model = peft.PeftModel.from_pretrained(base, FOLDER)"]
    return card.text(reader.read(finished.run_dir), "peft" if adapter else "transformers", base, use)
