"""The inputs of the model are looked at once, and nothing is copied on the way that need not be."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import drivetrain
from drivetrain import data
from drivetrain.core import lazy
from drivetrain.core.errors import UserError
from drivetrain.core.options.option import RunSpec
from drivetrain.core.step.microbatch import MicroBatch, Request
from drivetrain.core.step.source import Subset
from drivetrain.core.step.tensors import Tensors
from drivetrain.data import decoding, digits
from drivetrain.engine import input_checks
from drivetrain.loader import Loader, Pipeline
from drivetrain.loss.classification import CrossEntropy

PACKAGE = Path(drivetrain.__file__).parent


def images(mean: float, std: float, n: int = 16, c: int = 3) -> torch.Tensor:
    return mean + std * torch.randn(n, c, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.4, 1.0), (-0.3, 0.5), (1.0, 2.0), (0.0, 2.5)])
def test_normalised_inputs_pass(mean, std):
    assert input_checks.normalisation_warning(images(mean, std)) is None


@pytest.mark.parametrize(
    ("mean", "std"), [(128.0, 60.0), (0.45, 0.25), (0.0, 0.1), (0.0, 9.0), (-3.0, 1.0)],
    ids=["raw bytes", "in 0 to 1", "too narrow", "too wide", "off"],
)  # fmt: skip
def test_others_are_named_with_their_numbers(mean, std):
    line = input_checks.normalisation_warning(images(mean, std))
    x = images(mean, std)
    assert f"channel 0: mean {float(x[:, 0].mean()):.3g}, std {float(x[:, 0].std()):.3g}; channel 1: " in line
    assert "Set data.normalize=measured" in line


def test_only_the_channels_that_are_off_are_named():
    x = images(0.0, 1.0, c=6)
    x[:, 2] += 50
    assert "(channel 2: mean" in input_checks.normalisation_warning(x)
    assert "channel 0" not in input_checks.normalisation_warning(x)
    x += 50
    assert "channel 2" in input_checks.normalisation_warning(x)
    assert "channel 3" not in input_checks.normalisation_warning(x)
    assert "and 3 more" in input_checks.normalisation_warning(x)


def test_what_has_no_mean_is_left_alone():
    assert input_checks.normalisation_warning(torch.randint(0, 255, (4, 3, 8, 8), dtype=torch.uint8)) is None
    assert input_checks.normalisation_warning(torch.randint(0, 50_000, (4, 128))) is None  # tokens
    assert input_checks.normalisation_warning(torch.full((4, 1), 7.0)) is None
    assert input_checks.normalisation_warning(10 + torch.randn(8, 20)) is None  # features have scales of their own


def test_sixteen_bits_and_a_large_batch_are_read_in_float32():
    assert input_checks.normalisation_warning(images(0.0, 1.0, n=500).to(torch.float16)) is None
    assert "mean" in input_checks.normalisation_warning(images(300.0, 1.0).to(torch.bfloat16))


def first_batch(at_start=True, note=""):
    loss = CrossEntropy()
    return input_checks.FirstBatch(RunSpec({}, {}), loss, 2, {}, lambda: torch.zeros(1), lambda: at_start, note)


def test_the_stream_passes_unchanged_and_only_its_first_is_read(monkeypatch, caplog):
    caplog.set_level("INFO")
    micros = [MicroBatch(images(100.0, 1.0), torch.zeros(1, dtype=torch.int64), torch.ones(()), True, False) for _ in range(4)]
    looked = []
    look = input_checks.normalisation_warning
    monkeypatch.setattr(input_checks, "normalisation_warning", lambda x: looked.append(x) or look(x))
    out = []
    for micro in first_batch(note="no MFU").watch(iter(micros)):
        assert ["no MFU" in line for line in caplog.messages] == [False, True][: 1 + (len(out) > 0)]  # after the first step
        out.append(micro)
    assert all(a is b for a, b in zip(out, micros, strict=True))
    assert len(looked) == 1
    assert looked[0] is micros[0].x
    assert list(first_batch().watch(iter(()))) == []
    assert len(list(first_batch(at_start=False).watch(iter(micros)))) == 4
    assert len(looked) == 1  # a stage that follows, and a resumed run, were told


def test_a_label_of_any_set_that_is_out_of_range_is_named():
    y = torch.arange(40) % 2
    y[33] = 5
    y[[2, 3, 39]] = -100  # not counted
    first = first_batch()
    first.sources = {"train": Tensors(y, y % 2), "test noisy": Subset(Tensors(y, y), torch.arange(20, 40))}
    first.run.choices["data"] = "mine"
    with pytest.raises(
        UserError, match=r"from 0 to 5, but the model has 2 .* first of them is sample 33 of data=mine \(in the test noisy"
    ):
        first.check_targets(MicroBatch(images(0.0, 1.0), torch.zeros(16, dtype=torch.int64), torch.ones(()), True, False))


def test_a_run_says_it_once_and_trains_on(train, caplog):
    for normalize in ("true", "false"):
        train("data=digits", f"data.normalize={normalize}", "updates=3", "epochs=9", "optimizer.lr=0.001", updates=3)
        remarks = [line for line in caplog.messages if "not normalised" in line]
        assert len(remarks) == (normalize == "false")
        assert all("the model's inputs are not normalised (channel 0: mean" in line for line in remarks)


# --- no copies ---


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_batch_on_its_device_reaches_the_step_as_it_is():
    x, y = images(0, 1), torch.zeros(16, dtype=torch.long)
    micro = Loader().to_device(
        Pipeline(None, (), None, 0), x.device, torch.contiguous_format, torch.tensor, x, y, Request(0, torch.arange(16), 1.0)
    )
    assert (pointer(micro.x), pointer(micro.y)) == (pointer(x), pointer(y))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalising_leaves_its_source_alone(dtype: torch.dtype):
    """float() of a float is no copy: what the data holds must not be worked in."""
    normalize = data.Normalize([1.0, 2.0, 3.0], [1.0, 2.0, 4.0])
    raw = torch.randint(0, 255, (4, 3, 8, 8)).to(dtype)
    before = raw.clone()
    out = normalize(raw)
    assert torch.equal(raw, before)
    expected = (raw.double() - torch.tensor([1.0, 2, 3]).view(-1, 1, 1)) / torch.tensor([1.0, 2, 4]).view(-1, 1, 1)
    torch.testing.assert_close(out.double(), expected)


def test_arrays_become_tensors_over_the_same_memory(tmp_path, monkeypatch):
    """Digits and images pass torch.from_numpy: what is cut out of an image lies where the array does until it is resized."""
    arrays = []
    from_numpy = torch.from_numpy

    def watched(array: np.ndarray) -> torch.Tensor:
        arrays.append(array)
        tensor = from_numpy(array)
        assert tensor.data_ptr() == array.__array_interface__["data"][0]
        return tensor

    monkeypatch.setattr(lazy.torch, "from_numpy", watched)  # what drivetrain.core.lazy gives
    Image.new("RGB", (12, 10), (10, 20, 30)).save(tmp_path / "a.png")
    image = decoding.decode((tmp_path / "a.png").read_bytes(), "a.png", 8, 10**6)
    assert len(arrays) == 1
    assert image.shape == (3, 8, 8)
    digits.read_digits()
    assert len(arrays) == 3  # pixels and labels


def test_no_array_is_copied_into_a_tensor():
    """torch.tensor(array) copies; numbers and lists of them must be."""
    found = []
    for name in ("data", "loader", "augment", "core"):
        files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0].removesuffix(".py") == name]
        assert files, name
        for file in files:
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.tensor":
                    found.append((file.name, ast.unparse(node.args[0])))
    assert found  # the reader reads
    assert not [call for call in found if "np." in call[1] or "array" in call[1] or "table" in call[1]]
