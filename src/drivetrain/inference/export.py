"""Exports a finished run as a file to use without drivetrain, and checks that the file gives the same output."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch

from drivetrain.core import files
from drivetrain.core.errors import UserError
from drivetrain.core.typed import JsonMapping, JsonObject
from drivetrain.engine.facts import RunFiles
from drivetrain.inference.finished import Finished
from drivetrain.saving import manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from drivetrain.inference.loaded import LoadedRun

Format = Literal["safetensors", "torch.export", "onnx", "torchscript", "transformers"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIX: dict[Format, str] = {
    "safetensors": ".safetensors",
    "torch.export": ".pt2",
    "onnx": ".onnx",
    "torchscript": ".ts",
    "transformers": "",
}
TOLERANCE = 1e-5  # of the largest output
LARGE = 1_500_000_000  # bytes: an ONNX file of more than 2 GB keeps its weights in a file beside it
Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Exported:
    """A file that was written and checked."""

    path: Path
    tensors: int
    difference: float | None  # the largest one of its outputs from the model's; None: not checked
    note: str = ""


def format_of(path: Path | None, given: str | None) -> Format:
    """Return the format that was named, or that a file's suffix names; the weights alone where neither says one.

    Raises UserError where they say different ones, and for a suffix that says none.
    """
    suffix = path.suffix if path is not None else ""
    by_suffix = next((kind for kind in FORMATS if suffix and SUFFIX[kind] == suffix.lower()), None)
    if given is not None and given not in FORMATS:
        raise UserError(f"--format {given}: there is {', '.join(FORMATS)}")
    if given is not None and by_suffix not in (None, given):
        raise UserError(
            f"{path}: a file of this name is {by_suffix}, and --format says {given}: leave it out, or rename the file"
        )
    if given is None and by_suffix is None and suffix:
        known = ", ".join(f"{SUFFIX[kind]} ({kind})" for kind in FORMATS if SUFFIX[kind])
        raise UserError(f"{path}: the format is not known from '{suffix}': name the file {known}, or say --format")
    return cast(Format, given) if given is not None else by_suffix or "safetensors"


def export_weights(finished: Finished, path: Path) -> Exported:
    """Write the weights alone, as safetensors under the model's own names."""
    import safetensors.torch

    weights = {name: t.contiguous() for name, t in finished.weights().items()}
    about = with_files(manifest.about(finished.checkpoint), finished.run_dir)
    about["update"] = int(finished.checkpoint.name)
    with _atomic(path) as temporary:
        safetensors.torch.save_file(weights, temporary, manifest.as_metadata(about))
        written = safetensors.torch.load_file(temporary)
        _check(max((_difference(written[name], t) for name, t in weights.items()), default=0.0), 0.0, path)
    return Exported(path, len(weights), 0.0)


def with_files(about: JsonMapping, run_dir: Path) -> JsonObject:
    """Return what a model must know, with the texts of the files by which its inputs are encoded. Raises UserError."""
    kept = RunFiles(run_dir, about.get("files") or {})
    return {**about, "files": {name: kept[name] for name in about.get("files") or {}}}


def export_program(loaded: LoadedRun, path: Path, kind: Format, with_normalize: bool) -> Exported:
    """Write the model as a program, and compare its output with the model's, for another batch size than it was traced with.

    With `with_normalize` the file takes inputs as the data set has them; else they are normalised before.
    """
    program: torch.nn.Module = loaded.model
    if with_normalize:
        if loaded.transforms.normalize is None:
            raise UserError("--with-normalize: the run's inputs are not normalised: leave it out")
        program = _Normalized(loaded.transforms.normalize, loaded.model).eval()
    example = loaded.example()
    if not isinstance(example, torch.Tensor):
        raise UserError(f"--format {kind} takes models of one input tensor, and this one has several: set --format safetensors")
    example = example.contiguous()
    about = with_files(loaded.about, loaded.run_dir)
    about |= {"update": loaded.update, "input": _describe_input(loaded, with_normalize)}
    write, read = {
        "torch.export": (_write_exported_program, _read_exported_program),
        "onnx": (_write_onnx, _read_onnx),
        "torchscript": (_write_torchscript, _read_torchscript),
    }[kind]
    with _atomic(path) as temporary, torch.no_grad():
        try:
            write(program, example, temporary, manifest.as_metadata(about))
        except UserError:
            raise
        except Exception as error:  # an exporter refuses what it cannot express, in its own words
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(
                f"--format {kind} cannot express this model ({type(error).__name__}: {lines[0]}): try another format"
            ) from None
        found = read(temporary)
        difference = None if found is None else _largest_difference(program, found, example, loaded)
        if difference is not None:
            _check(difference, TOLERANCE, path)
    note = "" if difference is not None else "not checked: pip install 'drivetrain[onnx]'"
    return Exported(path, len(loaded.model.state_dict()), difference, note)


class _Normalized(torch.nn.Module):
    """A model that normalises its inputs itself."""

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, normalize: Any, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", normalize.mean.clone())
        self.register_buffer("std", normalize.std.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model((x.float() - self.mean) / self.std)


def _describe_input(loaded: LoadedRun, with_normalize: bool) -> str:
    if loaded.transforms.tokens:
        return "tokens, int64"
    if with_normalize:
        return "values as the data set has them, float32: the file normalises them"
    return "normalised, float32: (x - mean) / std" if loaded.transforms.normalize is not None else "float32"


def _largest_difference(program: torch.nn.Module, found: Run, example: torch.Tensor, loaded: LoadedRun) -> float:
    """The largest difference of outputs for a batch of one and one of five, as a share of the largest output."""
    largest = 0.0
    generator = torch.Generator().manual_seed(0)
    for size in (1, 5):
        if example.is_floating_point():
            x = torch.randn(size, *example.shape[1:], generator=generator)
        else:
            x = torch.randint(
                loaded.about["vocabulary"] or loaded.about["outputs"], (size, *example.shape[1:]), generator=generator
            )
        expected = program(x)
        largest = max(largest, _difference(found(x), expected) / max(1.0, float(expected.abs().max())))
    return largest


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _check(difference: float, limit: float, path: Path) -> None:
    if not difference <= limit:
        raise UserError(f"{path} was not written: its output differs from the model's by {difference:.1e}, more than {limit:.0e}")


@contextmanager
def _atomic(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place once all went well."""
    temporary = path.with_name(f".writing-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.mode_of_umask(temporary), warnings.catch_warnings(), _without_messages():
            warnings.simplefilter("ignore")
            yield temporary
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def _without_messages() -> Iterator[None]:
    """Exporters log and print much about their own ways; what ends an export is an exception."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _write_exported_program(model: torch.nn.Module, example: torch.Tensor, path: Path, about: Mapping[str, str]) -> None:
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    with path.open("wb") as file:  # torch insists on its own suffix in a name
        torch.export.save(program, file, extra_files=dict(about))


def _read_exported_program(path: Path) -> Run:
    with path.open("rb") as file:
        return torch.export.load(file).module()


def _write_torchscript(model: torch.nn.Module, example: torch.Tensor, path: Path, about: Mapping[str, str]) -> None:
    torch.jit.save(torch.jit.trace(model, example, check_trace=False), str(path), _extra_files=dict(about))


def _read_torchscript(path: Path) -> Run:
    return torch.jit.load(str(path))


def _write_onnx(model: torch.nn.Module, example: torch.Tensor, path: Path, about: Mapping[str, str]) -> None:
    missing = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if missing:
        raise UserError(f"--format onnx needs {' and '.join(missing)}: pip install 'drivetrain[onnx]'")
    batch = torch.export.Dim("batch", min=1)
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        dynamic_shapes=({0: batch},),
        input_names=["input"],
        output_names=["output"],
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props.update(about)
    program.save(str(path), external_data=sum(t.nbytes for t in model.state_dict().values()) > LARGE)


def _read_onnx(path: Path) -> Run | None:
    """The file as onnxruntime runs it; None where that is not installed."""
    if find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
