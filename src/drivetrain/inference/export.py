"""Exports a finished run as a file for use without drivetrain, and checks the file's output."""

from __future__ import annotations

import io
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from drivetrain.adapter import layers as adapter_layers
from drivetrain.adapter.base import Lora
from drivetrain.core.errors import UserError, did_you_mean
from drivetrain.core.machine import files
from drivetrain.core.step.trees import Tree
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.data.base import Normalize
from drivetrain.data.tokenizer import SETTINGS
from drivetrain.engine.summary import KeptFiles
from drivetrain.inference import card
from drivetrain.inference.finished import Finished, chosen_weights
from drivetrain.inference.loaded import LoadedRun, open_run
from drivetrain.model.transformers import Transformers
from drivetrain.run import reader
from drivetrain.saving import checkpoint_io, manifest
from drivetrain.ui.output import writing

SUFFIX = {"safetensors": ".safetensors", "torch.export": ".pt2", "onnx": ".onnx", "torchscript": ".ts", "transformers": ""}
TOLERANCE = 1e-5  # of the largest output
LARGE = 1_500_000_000  # bytes: an ONNX file of more than 2 GB keeps its weights in a second file
Axes = dict[int, object]
Run = Callable[[Tree], torch.Tensor]


def format_named(word: str) -> str | None:
    """The format of a word: its own name, or onnx, pt2 or ts; None for other words."""
    names = {kind: kind for kind in SUFFIX} | {own.removeprefix("."): kind for kind, own in SUFFIX.items() if own}
    return names.get(word.lower())


def format_of(path: Path | None, given: str | None) -> str:
    """Return the named format, or the format of a file's suffix; without either, the weights alone.

    Raises UserError if the two differ, and for a suffix without a format.
    """
    suffix = path.suffix if path is not None else ""
    by_suffix = {own: kind for kind, own in SUFFIX.items() if own}.get(suffix.lower())
    if given is not None and given not in SUFFIX:
        raise UserError(f"--format {given}: there is {', '.join(SUFFIX)}")
    if given is not None and by_suffix not in (None, given):
        raise UserError(
            f"{path}: a file of this name is {by_suffix}, and --format says {given}: leave it out, or rename the file"
        )
    if given is None and by_suffix is None and path is not None:
        known = ", ".join(f"{own} ({kind})" for kind, own in SUFFIX.items() if own)
        said = f"from '{suffix}'" if suffix else f"without a suffix ({did_you_mean(path.name, SUFFIX)})"
        raise UserError(f"{path}: the format is not known {said}: name the file {known}, or give a format")
    return given if given is not None else by_suffix or "safetensors"


def write(finished: Finished, path: Path, kind: str, with_normalize: bool = False, adapter: bool = False) -> str:
    """Write a run's model as a file, or as a folder of transformers, and check it; return what to print. Raises UserError.

    With `with_normalize` the file takes the data set's own values; otherwise normalised ones. With `adapter` the folder has only
    the adapter.
    """
    update = finished.checkpoint.name
    if kind == "safetensors":
        return f"{_write_weights(finished, path)} tensors of update {update}: {path}"
    if kind == "transformers":
        checked = _write_folder(finished, path, adapter)
    else:
        checked = _write_program(open_run(finished), path, kind, with_normalize)
    return f"update {update} as {kind}: {path}{checked}"


def _write_weights(finished: Finished, path: Path) -> int:
    """Write only the weights, under the model's own names; return their number."""
    import safetensors.torch

    weights = {name: t.contiguous() for name, t in finished.weights().items()}
    about = _with_files(manifest.about(finished.checkpoint), finished.run_dir) | {"update": int(finished.checkpoint.name)}
    with _atomic(path) as temporary:
        safetensors.torch.save_file(weights, temporary, manifest.as_metadata(about))
        written = safetensors.torch.load_file(temporary)
        if not all(torch.equal(written[name], t) for name, t in weights.items()):
            raise UserError(f"{path} was not written: reading it gives other weights")
    return len(weights)


def _with_files(about: JsonMapping, run_dir: Path) -> JsonObject:
    """The facts for using a model, with the texts of the files that encode its inputs. Raises UserError."""
    kept = KeptFiles(run_dir, about.get("files") or {})
    return {**about, "files": {name: kept[name] for name in about.get("files") or {}}}


def _write_program(loaded: LoadedRun, path: Path, kind: str, with_normalize: bool) -> str:
    """Write the model as a program, and compare its output with the model's."""
    program: torch.nn.Module = loaded.model
    if with_normalize:
        if loaded.transforms.normalize is None:
            raise UserError("--with-normalize: the run's inputs are not normalised: leave it out")
        program = _Normalized(loaded.transforms.normalize, loaded.model).eval()
    example = _example(loaded)
    if not isinstance(example, torch.Tensor):
        raise UserError(f"--format {kind} takes models of one input tensor, and this one has several: set --format safetensors")
    about = _with_files(loaded.about, loaded.run_dir)
    described = "normalised, float32: (x - mean) / std" if loaded.transforms.normalize is not None else "float32"
    described = "values as the data set has them, float32: the file normalises them" if with_normalize else described
    if loaded.transforms.tokens:
        about["padding"] = loaded.data.pad_token or 0
    about |= {"update": loaded.update, "input": "tokens, int64" if loaded.transforms.tokens else described}
    write, read = {
        "torch.export": (_write_exported_program, _read_exported_program),
        "onnx": (_write_onnx, _read_onnx),
        "torchscript": (_write_torchscript, _read_torchscript),
    }[kind]
    with _atomic(path) as temporary, torch.no_grad():
        try:
            write(program, example.contiguous(), _axes(loaded), temporary, manifest.as_metadata(about))
        except (UserError, OSError):
            raise
        except Exception as error:  # exporters refuse models with errors of any type
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"--format {kind} cannot express this model ({type(error).__name__}: {lines[0]}): try another format"
            ) from None
        found = read(temporary)
        return " (not checked: pip install 'drivetrain[onnx]')" if found is None else _compared(program, found, loaded, path)


def _compared(ours: Run, theirs: Run, loaded: LoadedRun, path: Path, instead: str = "") -> str:
    """A remark on the difference between the file's outputs and the model's, for other batches than the traced one.

    Raises UserError if they differ.
    """
    example, generator, worst, fixed = _example(loaded), torch.Generator().manual_seed(0), 0.0, ""
    half = (5, 0.5 if loaded.transforms.tokens else 1.0)
    for size, share in ((1, 1.0), half):
        x = example
        if isinstance(example, torch.Tensor):
            shape = (size, *(math.ceil(share * n) for n in example.shape[1:]))
            numbers, is_float = loaded.about["vocabulary"] or loaded.about["outputs"], example.is_floating_point()
            x = torch.randn(shape, generator=generator) if is_float else torch.randint(numbers, shape, generator=generator)
        try:
            expected, found = ours(x), theirs(x)
        except Exception:  # networks and runtimes refuse a length with errors of any type
            if share == 1:
                raise
            fixed = f", for texts of {example.shape[1]} tokens alone"
            continue
        difference = float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        if not difference <= TOLERANCE:
            raise UserError(
                f"{path} was not written: its output differs from the model's by {difference:.1e}, more than {TOLERANCE:.0e}"
                + instead
            )
        worst = max(worst, difference)
    return f" (matches the model's output to {worst:.0e}{fixed})"


def _example(loaded: LoadedRun) -> Tree:
    """A batch of two zeros; for packed texts only the tokens, as in prediction."""
    example = loaded.example()
    return example["input_ids"] if isinstance(example, dict) and getattr(loaded.run.data, "packing", False) else example


def _axes(loaded: LoadedRun) -> Axes:
    """The axes of variable size: samples, and a text's length if the model takes any."""
    return {0: torch.export.Dim("batch", min=1), **({1: torch.export.Dim.AUTO} if loaded.transforms.tokens else {})}


class _Normalized(torch.nn.Module):
    """A model that normalises its own inputs."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, normalize: Normalize, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", normalize.mean.clone())
        self.register_buffer("std", normalize.std.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model((x.float() - self.mean) / self.std)
        return output


@contextmanager
def _atomic(path: Path) -> Iterator[Path]:
    """A temporary file or folder that replaces `path` after success, along with files written next to it."""
    folder = path.with_name(f".writing-{path.name}")
    files.remove(folder)
    try:
        with writing(path):
            folder.mkdir(parents=True)
            with warnings.catch_warnings(), _without_messages():
                warnings.simplefilter("ignore")
                yield folder / path.name
            for file in filter(Path.is_file, folder.rglob("*")):
                file.chmod(folder.stat().st_mode & 0o666)  # by the umask, because safetensors lets only the owner read it
            for made in list(folder.iterdir()):
                made.replace(path.with_name(made.name))
    finally:
        files.remove(folder)


@contextmanager
def _without_messages() -> Iterator[None]:
    """Silence the exporters' logs and prints; failures raise exceptions."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _write_exported_program(
    model: torch.nn.Module, example: torch.Tensor, axes: Axes, path: Path, about: Mapping[str, str]
) -> None:
    program = torch.export.export(model, (example,), dynamic_shapes=(axes,))
    written = io.BytesIO()  # on a full disk torch's own writer would end the process
    torch.export.save(program, written, extra_files=dict(about))
    path.write_bytes(written.getbuffer())


def _read_exported_program(path: Path) -> Run:
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_torchscript(model: torch.nn.Module, example: torch.Tensor, axes: Axes, path: Path, about: Mapping[str, str]) -> None:
    traced = torch.jit.trace(model, example, check_trace=False)
    written = io.BytesIO()
    torch.jit.save(traced, written, _extra_files=dict(about))
    path.write_bytes(written.getbuffer())


def _read_torchscript(path: Path) -> Run:
    program: Run = torch.jit.load(str(path))
    return program


def _write_onnx(model: torch.nn.Module, example: torch.Tensor, axes: Axes, path: Path, about: Mapping[str, str]) -> None:
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise UserError(f"--format onnx needs {' and '.join(missing)}: pip install 'drivetrain[onnx]'")
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=(axes,),
        input_names=["input"],
        output_names=["output"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(about)
    program.save(str(path), external_data=sum(t.nbytes for t in model.state_dict().values()) > LARGE)


def _read_onnx(path: Path) -> Run | None:
    """The file in onnxruntime; None if that is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def _write_folder(finished: Finished, folder: Path, adapter: bool) -> str:
    """Write the merged model for transformers, or only its adapter for peft, with the tokenizer and a model card."""
    run = finished.job.run
    option = run.model
    if not isinstance(option, Transformers):
        raise UserError(f"--format transformers is for runs with model=transformers, and this one has {run.named('model')}")
    if adapter and not run.adapter.active:
        raise UserError("--adapter: the run has no adapter (adapter=none): leave it out")
    if adapter and not option.began:
        raise UserError(
            "--adapter: the frozen weights of this run began at random, and are in no folder that others have: leave --adapter "
            "out, so that the whole model is written"
        )
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: name another folder")
    loaded, base = open_run(finished), None if Path(str(option.name)).exists() else option.name
    cls, checked = type(loaded.model).__name__, ""
    with _atomic(folder) as temporary:
        temporary.mkdir()
        if adapter:
            lora = Lora.of(run)
            weights = chosen_weights(finished.checkpoint, *checkpoint_io.load(finished.checkpoint), finished.average)
            adapter_layers.write_peft(temporary, weights, lora.trained_whole(loaded.model), base, lora.in_peft())
            checked = _check_adapter(loaded, option, temporary, folder)
            library, use = "peft", [
                f"base = transformers.{cls}.from_pretrained(BASE)", "model = peft.PeftModel.from_pretrained(base, FOLDER)",
            ]  # fmt: skip
        else:
            checked = _write_whole(loaded, temporary, folder)
            library, use = "transformers", [f"model = transformers.{cls}.from_pretrained(FOLDER)"]
        for name in ("tokenizer.json", SETTINGS) if (finished.run_dir / SETTINGS).is_file() else ():
            shutil.copyfile(finished.run_dir / name, temporary / name)
        files.write_text(temporary / "README.md", card.text(reader.read(finished.run_dir), library, base, use))
    return checked


def _write_whole(loaded: LoadedRun, written: Path, folder: Path) -> str:
    """Write the model of transformers, and compare its outputs with those of the files read again."""
    model: Any = loaded.model
    model.config.use_cache = True  # off in training, but needed to generate
    model.save_pretrained(written)
    model.config.use_cache = False
    again = type(model).from_pretrained(written, use_safetensors=True)
    again.config.use_cache = False
    return _same_outputs(again, loaded, folder)


def _check_adapter(loaded: LoadedRun, option: Transformers, written: Path, folder: Path) -> str:
    """Compare the model's outputs with those of peft's reading of base and adapter."""
    if find_spec("peft") is None:
        return " (not checked: pip install peft)"
    if (kept := Lora.of(loaded.run).base) != "full":
        return f" (not checked: the run's frozen weights were rounded, adapter.base={kept})"
    from peft import PeftModel

    try:
        base = type(loaded.model).from_pretrained(  # type: ignore[attr-defined]
            option.place(), config=loaded.model.config, use_safetensors=True, ignore_mismatched_sizes=True
        )
    except OSError:
        return f" (not checked: {option.name} is not there)"
    instead = ": peft unties the weights of a module that trained as a whole: leave --adapter out, so that the whole is written"
    return _same_outputs(PeftModel.from_pretrained(base, str(written)), loaded, folder, instead)


def _same_outputs(again: torch.nn.Module, loaded: LoadedRun, folder: Path, instead: str = "") -> str:
    """Compare a model's outputs with those of its reread copy; return a remark. Raises UserError."""
    model = loaded.model
    again.eval()

    def call(function: Callable[..., object], x: Tree) -> Any:
        return function(**(x if isinstance(x, dict) else {str(model.main_input_name): x}))

    with torch.no_grad():
        return _compared(lambda x: call(model, x), lambda x: call(again, x).logits, loaded, folder, instead)
