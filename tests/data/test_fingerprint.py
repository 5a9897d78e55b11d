"""The fingerprint of a training set: of its content, whatever the seed, the device or the order in memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from drivetrain.core.tensors import Tensors
from drivetrain.data import base as module
from drivetrain.data.base import fingerprint
from drivetrain.data.own import OwnSource
from drivetrain.data.samples import Stack
from drivetrain.data.text import Texts
from drivetrain.launch.job import prepare


def tensors(**changed: torch.Tensor) -> Tensors:
    found = {"x": torch.arange(24.0).reshape(6, 4), "y": torch.arange(6) % 2, **changed}
    return Tensors(found["x"], found["y"])


def of_option(*words: str) -> dict[str, object]:
    """The fingerprint of a run's training data, as it was split."""
    run = prepare(["model=mlp", *words]).run
    return fingerprint(run.data.load_sets(torch.device("cpu")).train)


def test_tensors_are_hashed_as_a_whole():
    found = fingerprint(tensors())
    assert (found["of"], found["samples"], len(found["hash"])) == ("content", 6, 32)
    assert fingerprint(tensors()) == found
    turned = torch.arange(24.0).reshape(6, 4).t().contiguous().t()
    assert fingerprint(tensors(x=turned)) == found, "the order in memory is no content"
    last = torch.arange(24.0).reshape(6, 4)
    last[5, 3] = 0.5
    others = [tensors(x=last), tensors(y=torch.zeros(6, dtype=torch.int64)), tensors(x=torch.arange(24.0).reshape(6, 2, 2))]
    others.append(tensors(x=torch.arange(24).reshape(6, 4)))
    hashes = {fingerprint(other)["hash"] for other in others}
    assert len(hashes) == 4
    assert found["hash"] not in hashes


def test_a_part_of_them_is_that_part():
    part = tensors().subset(torch.tensor([0, 1, 2]))
    whole = Tensors(torch.arange(12.0).reshape(3, 4), torch.tensor([0, 1, 0]))
    assert fingerprint(part) == fingerprint(whole)


def test_of_many_bytes_some_samples_are_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    monkeypatch.setattr(module, "SAMPLES", 3)
    found = fingerprint(tensors())
    assert found["of"] == "3 samples"
    between, at = torch.arange(24.0).reshape(6, 4), torch.arange(24.0).reshape(6, 4)
    between[1], at[4] = 0, 0
    assert fingerprint(tensors(x=between)) == found
    assert fingerprint(tensors(x=at))["hash"] != found["hash"]


def test_documents_are_hashed_by_their_content():
    found = fingerprint(Texts([b"first", b"second one"], 4))
    assert (found["of"], found["samples"]) == ("content", 5)
    assert fingerprint(Texts([b"first", b"second two"], 4))["hash"] != found["hash"]


class Drawing(torch.utils.data.Dataset):
    """Augments its own samples, with every generator there is."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(3) + random.random() + np.random.rand(), index % 2


def test_a_set_that_draws_at_random_has_one_too_and_draws_the_same_afterwards():
    source = OwnSource(Drawing(), "data.target", Stack())
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        expected = [torch.rand(1).item(), random.random(), np.random.rand()]
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        found.append(fingerprint(source))
        assert [torch.rand(1).item(), random.random(), np.random.rand()] == expected
    assert found[0] == found[1]
    assert found[0]["of"] == "32 samples"


class Broken(Drawing):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise RuntimeError("the disk is gone")


def test_what_cannot_be_read_has_none():
    assert fingerprint(OwnSource(Broken(), "data.target", Stack())) is None


def test_it_is_the_datas_and_not_the_seeds():
    words = ["data=digits"]
    assert of_option(*words, "runtime.seed=1") == of_option(*words, "runtime.seed=2", "batch.global_batch=16")
    assert of_option(*words)["hash"] != of_option(*words, "data.validation=0.1")["hash"]


def test_a_table_is_its_rows_as_they_were_written(tmp_path):
    """And not as they were standardised, which CPUs of other kinds round otherwise. Held-out rows are not among them."""
    rows = [f"{n},{n * n % 7},{'ab'[n % 2]}" for n in range(40)]
    words = ["data=tabular", "data.path=table.csv", "data.target=t", "data.validation=0.2"]
    found = []
    for lines in (rows, [*rows[:39], "39,0.5,b"], rows):
        (tmp_path / "table.csv").write_text("\n".join(["a,b,t", *lines]))
        found.append(of_option(*words, f"data.normalize={str(len(found) < 2).lower()}"))
    assert found[0]["of"] == "content"
    assert found[0]["samples"] < of_option(*words[:-1], "data.validation=null")["samples"] < 40
    assert found[0] == found[2]
    assert found[0] != found[1]


@pytest.fixture
def photos(tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for name in ("cat", "dog"):
            for number in range(3):
                folder = tmp_path / "photos" / split / name
                folder.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (number * 40, 0, 80)).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_image_files_are_their_names_and_some_of_their_bytes(photos):
    words = ["data=imagefolder", f"data.root={photos}", "data.validation=null", "model=resnet9"]
    found = of_option(*words)
    assert (found["of"], found["samples"]) == ("names and 6 files", 6)
    moved = photos.rename(photos.parent / "elsewhere")
    words[1] = f"data.root={moved}"
    assert of_option(*words) == found
    (moved / "train/cat/0.png").write_bytes((moved / "train/cat/1.png").read_bytes())
    assert of_option(*words) != found
