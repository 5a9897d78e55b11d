"""Data sets of Hugging Face's library, from disk."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.core.errors import DataError, UserError
from drivetrain.data.huggingface import HuggingFace

CPU = torch.device("cpu")


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((9, 10), number, np.uint8)).save(out, "PNG")  # grey
    return out.getvalue()


@pytest.fixture
def saved(tmp_path):
    """`saved(train=rows, test=rows)`: splits of numbered images on disk; one Dataset where only `train` is given."""
    datasets = pytest.importorskip("datasets")

    def write(train=range(40), test=None, broken=()) -> Path:
        def split(numbers):
            images = [{"bytes": b"x" if n in broken else png(n), "path": None} for n in numbers]
            columns = {"image": images, "label": [n % 3 for n in numbers], "caption": [f"é{n}" for n in numbers]}
            columns["share"], columns["signed"] = [n / 2 for n in numbers], [n - 5 for n in numbers]
            kinds = {
                "image": datasets.Image(),
                "label": datasets.ClassLabel(names=list("abc")),
                "caption": datasets.Value("string"),
                "share": datasets.Value("float64"),
                "signed": datasets.Value("int64"),
            }
            return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))

        made = split(train) if test is None else datasets.DatasetDict({"train": split(train), "validation": split(test)})
        made.save_to_disk(str(tmp_path / "hub"))
        return tmp_path / "hub"

    return write


def test_images_labels_and_names(saved):
    splits = HuggingFace(root=str(saved(test=range(100, 110))), size=8).load(CPU)
    x, y = splits.train.fetch(torch.tensor([5, 39, 5]))
    assert (x.dtype, x.shape) == (torch.uint8, (3, 3, 8, 8))
    assert x[:, 0, 0, 0].tolist() == [5, 39, 5]
    assert y.tolist() == [2, 0, 2]
    assert splits.test.fetch(torch.arange(10))[0][:, 2, 7, 7].tolist() == list(range(100, 110))
    assert (splits.classes, splits.names, splits.shape) == (3, ["a", "b", "c"], (3, 8, 8))


def test_classes_are_matched_by_their_names(tmp_path):
    """class_encode_column on each split alone numbers the classes of each as they come."""
    datasets = pytest.importorskip("datasets")
    splits = {}
    for split, kinds in {"train": "abc", "test": "bc"}.items():
        kind = datasets.ClassLabel(names=sorted(kinds))
        features = datasets.Features({"text": datasets.Value("string"), "label": kind})
        rows = {"text": list(2 * kinds), "label": [kind.str2int(letter) for letter in 2 * kinds]}
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "a"))
    datasets.Dataset.from_dict({key: [*"babcab"] for key in ("text", "label")}).save_to_disk(str(tmp_path / "texts"))
    for name in ("a", "texts"):
        data = HuggingFace(root=str(tmp_path / name), image=None, text="text", length=4, holdout=0.5, validation=None).load(CPU)
        assert data.names == ["a", "b", "c"]
        for source in (data.train, data.test):
            x, y = source.fetch(torch.arange(len(source)))
            assert [data.names[label] for label in y] == [chr(token - 1) for token in x[:, 0]]
    datasets.DatasetDict({"train": splits["test"], "test": splits["train"]}).save_to_disk(str(tmp_path / "b"))
    with pytest.raises(DataError, match=r"/b, row 1, 4: no training row has the class a of label"):
        HuggingFace(root=str(tmp_path / "b"), image=None, text="text", validation=None).load(CPU)


def test_without_a_split_for_the_test_samples_are_held_out(saved):
    splits = HuggingFace(root=str(saved()), size=8, holdout=0.25).load(CPU)
    train, test = (s.fetch(torch.arange(len(s)))[0][:, 0, 0, 0].tolist() for s in (splits.train, splits.test))
    assert sorted(train + test) == list(range(40))
    assert len(test) == 10


def test_the_validation_set_is_a_split_or_a_share_of_the_training(saved):
    option = HuggingFace(root=str(saved(test=range(100, 110))), size=8, validation=0.25)
    data = option.load_sets(CPU)
    parts = [s.fetch(torch.arange(len(s))) for s in (data.train, data.validation)]
    assert sorted(torch.cat([x[:, 0, 0, 0] for x, _ in parts]).tolist()) == list(range(40))
    assert torch.bincount(parts[1][1]).tolist() in ([3, 4, 3], [4, 3, 3], [3, 3, 4]), "of each class a quarter"
    named = HuggingFace(root=option.root, size=8, validation="validation", holdout=0.25).load_sets(CPU)
    assert [len(s) for s in (named.train, named.validation, named.test)] == [30, 10, 10]
    texts = HuggingFace(root=option.root, image=None, text="caption", validation=0.1).load_sets(CPU)
    assert (len(texts.train), len(texts.validation)) == (36, 4)


def test_texts_come_as_bytes(saved):
    splits = HuggingFace(root=str(saved(test=range(3))), image=None, text="caption", length=4).load(CPU)
    x, y = splits.train.fetch(torch.tensor([7, 12]))
    assert x.tolist() == [[0xC3 + 1, 0xA9 + 1, ord("7") + 1, 0], [0xC3 + 1, 0xA9 + 1, ord("1") + 1, ord("2") + 1]]
    assert y.tolist() == [1, 0]
    assert (splits.shape, splits.normalize) == ((4,), None)


def test_images_that_are_paths_are_read_from_there(saved, tmp_path):
    datasets = pytest.importorskip("datasets")
    for number in range(10):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [str(tmp_path / f"{n}.png") for n in range(10)], "label": list(range(10))}
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(str(tmp_path / "paths"))
    splits = HuggingFace(root=str(tmp_path / "paths"), size=8, holdout=0.2).load(CPU)
    x, y = splits.train.fetch(torch.tensor([3]))
    assert x.unique().tolist() == y.tolist()
    assert splits.classes == 10


def test_a_broken_image_is_named_by_its_row(saved):
    root = saved(test=range(5), broken=[4])
    strict = HuggingFace(root=str(root), size=8).load(CPU).train
    with pytest.raises(DataError, match=r"hub, row 5 cannot be read as an image"):
        strict.fetch(torch.tensor([4]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"image": "picture"}, r"data\.image=picture: .* has no such column"),
        ({"label": "lable"}, r"data\.label=lable: .*did you mean 'label'"),
        ({"image": "picture", "label": "lable"}, r"data\.image=picture: .* has no such column.*\n.*data\.label=lable"),
        ({"label": "image"}, "the column image holds struct.*, which is no number and no text"),
        ({"label": "share"}, r"hub, row 2, .*: the class 0.5 of share is no whole number from 0 on, as others are"),
        ({"label": "signed"}, r"hub, row 1, .*: the class -5 of signed is no whole number from 0 on, as others are"),
        ({"image": "caption"}, "is no column of images"),
        ({"train": "trian"}, "has no such split: did you mean 'train'"),
        ({"test": "held"}, r"data\.test=held"),
    ],
)
def test_what_is_not_there_is_refused(saved, settings, says):
    with pytest.raises(UserError, match=says):
        HuggingFace(root=str(saved(test=range(3))), size=8, **settings).load(CPU)


def test_a_folder_that_is_none_is_refused(tmp_path, problems):
    pytest.importorskip("datasets")
    with pytest.raises(UserError, match="cannot be read as a data set"):
        HuggingFace(root=str(tmp_path)).load(CPU)
    assert any("needs data.root" in p for p in problems("data=huggingface"))
    words = ["data=huggingface", f"data.root={tmp_path}"]
    assert any("is no directory" in p for p in problems("data=huggingface", "data.root=nowhere"))
    assert any("name one column" in p for p in problems(*words, "data.text=caption"))


def test_without_the_library_it_is_said(problems, tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "datasets" else find(name, *a))
    said = problems("data=huggingface", f"data.root={tmp_path}")
    assert said == ["data=huggingface needs the package 'datasets', which is not installed: pip install 'drivetrain[datasets]'"]


def test_texts_are_tokenized_by_the_models_own_tokenizer(saved, tmp_path, make):
    """As transformers does it, with its padding, and [CLS] and [SEP]."""
    transformers = pytest.importorskip("transformers")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "caption", *map(str, range(40)), "##a"]
    folder, sizes = (
        tmp_path / "bert",
        {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
    )
    transformers.BertTokenizer(vocab={piece: n for n, piece in enumerate(pieces)}).save_pretrained(folder)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(pieces), **sizes)).save_pretrained(folder)
    (tmp_path / "run").mkdir()
    root = saved(test=range(3))
    words = ["data=huggingface", f"data.root={root}", "data.image=null", "data.text=caption", "data.length=6"]
    trainer = make(*words, "data.validation=null", "model=transformers", f"model.name={folder}", "model.pretrained=true")
    assert type(trainer.model).__name__ == "BertForSequenceClassification"
    source = trainer.train_data.source
    x, _ = source.fetch(torch.arange(3))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    found = theirs(source.rows[[0, 1, 2]]["caption"], padding="max_length", truncation=True, max_length=6)
    assert x.tolist() == found["input_ids"]
    assert set(trainer.run_dir.iterdir()) >= {trainer.run_dir / "tokenizer.json", trainer.run_dir / "tokenizer_config.json"}
