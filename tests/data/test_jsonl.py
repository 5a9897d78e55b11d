"""Texts: JSON lines with their tokenizers, and pieces of text with a class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.data.jsonl import Jsonl, TextFiles
from drivetrain.data.text import LabelledTexts, Stdlib
from drivetrain.data.tokenizer import from_json
from drivetrain.model.shipped import Gpt

CPU = torch.device("cpu")
TEXTS = [f"the {'cat' if i % 2 else 'dog'} number {i} sat on the mat, and then the mat sat on it" for i in range(80)]


def passages_of(source) -> list[str]:
    """The texts of a source whose tokens are bytes."""
    parts = source.documents.tokens.split(source.documents.sizes.tolist())
    return [bytes(parts[n].tolist()).decode() for n in source.which.tolist()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": t, "animal": "cat" if "cat" in t else "dog"}) + "\n" for t in TEXTS))
    return path


def test_bytes_of_texts_are_predicted_from_those_before(texts):
    splits = Jsonl(path=str(texts), length=16, holdout=0.2).load(CPU)
    x, y = splits.train.fetch(torch.tensor([0]))
    assert (splits.classes, splits.vocabulary) == (257, None)
    assert x[0, 0] == 256  # the begin of a text
    assert torch.equal(x[0, 1:], y[0, :-1])
    assert bytes(y[0].tolist()).decode() in TEXTS[0] + "".join(TEXTS)


def test_byte_pairs_are_trained_once_and_kept_with_the_run(texts):
    pytest.importorskip("tokenizers")
    option = Jsonl(path=str(texts), tokenizer="bpe", vocabulary=300, length=64, holdout=0.2)
    splits, again = option.load(CPU), option.load(CPU)
    assert splits.files == again.files
    tokenizer = from_json(splits.files["tokenizer.json"])
    assert 256 < tokenizer.size <= 300 == splits.classes - 1 or tokenizer.size == splits.classes - 1
    (tokens,) = tokenizer([TEXTS[3]])
    assert len(tokens) < len(TEXTS[3])
    assert tokenizer.tokenizer.decode(tokens.tolist()) == TEXTS[3]
    assert splits.token_bytes[tokens.long()].sum() == len(TEXTS[3])
    file = texts.parent / "tokenizer.json"
    file.write_text(splits.files["tokenizer.json"])
    loaded = Jsonl(path=str(texts), tokenizer="file", tokenizer_file=str(file), length=64, holdout=0.2).load(CPU)
    assert torch.equal(loaded.train.documents.tokens, splits.train.documents.tokens)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_text_has_a_class(texts, tokenizer):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    option = Jsonl(path=str(texts), label="animal", tokenizer=tokenizer, vocabulary=300, length=64, holdout=0.2)
    splits = option.load(CPU)
    assert (option.targets, splits.names, splits.classes) == ("class", ["cat", "dog"], 2)
    x, y = splits.train.fetch(torch.arange(len(splits.train)))
    assert len(y) + len(splits.test) == len(TEXTS)
    assert int(x.max()) < splits.vocabulary
    if tokenizer == "bytes":
        text = bytes((x[0][x[0] > 0] - 1).tolist()).decode()
        assert splits.names[y[0]] in text


@pytest.mark.parametrize(
    ("content", "settings", "says"),
    [
        ('{"text": "a"}\n{"text"', {}, r"t.jsonl:2: not JSON"),
        ('{"a": ' * 10_000, {}, r"t.jsonl:1: not JSON: maximum recursion depth"),
        ("Once upon a time", {}, r't.jsonl:1: not JSON: .*each line must be an object such as {"text": "…"}'),
        ('["a"]', {}, r"t.jsonl:1: list, but each line must be an object"),
        ('{"body": "a"}', {}, r"t.jsonl:1 has no 'text' \(data.text\): there is: body"),
        ('{"text": 3}', {}, r"'text' is int, not a text"),
        ('{"text": ""}', {}, "has no texts under the key 'text'"),
        ('{"text": "a", "y": [1]}', {"label": "y"}, "'y' is list: a class is a text or a whole number"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, content, settings, says):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(UserError, match=says):
        Jsonl(path=str(tmp_path / "t.jsonl"), **settings).load(CPU)


def test_pieces_of_documents_with_a_class():
    documents = [torch.arange(10, dtype=torch.uint8), torch.arange(100, 103, dtype=torch.uint8)]
    source = LabelledTexts(documents, [1, 0], length=4, max_pieces=2)
    x, y = source.fetch(torch.arange(len(source)))
    assert x.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [101, 102, 103, 0]]  # two of the three pieces of the first
    assert y.tolist() == [1, 1, 0]
    assert source.fetch(torch.tensor([2]))[0].shape == (1, 3)


def test_the_packages_of_the_standard_library_are_classes(tmp_path):
    for package in ("alpha", "beta", "tiny"):
        (tmp_path / package).mkdir()
        for i in range(2 if package == "tiny" else 30):
            (tmp_path / package / f"{i}.py").write_text(f"{package} = {i}\n")
    option = Stdlib(kind="class", root=str(tmp_path), length=16, holdout=0.3)
    option.targets = "class"
    splits = option.load(CPU)
    assert splits.names == ["alpha", "beta"]
    x, y = splits.train.fetch(torch.arange(3))
    for row, label in zip(x, y, strict=True):
        assert bytes((row[row > 0] - 1).tolist()).startswith(splits.names[label].encode())


def test_padding_does_not_change_what_a_classifier_says():
    model = Gpt(width=16, depth=1, heads=2, ngrams=2, buckets=50).classifier((12,), 3, 30).eval()
    torch.nn.init.normal_(model.blocks[0].attention.out.weight)
    x = torch.randint(1, 30, (4, 7))
    padded = torch.nn.functional.pad(x, (0, 5))
    assert model(x).shape == (4, 3)
    torch.testing.assert_close(model(padded), model(x))
    assert not torch.allclose(model(x.flip(1)), model(x))


def test_a_text_is_encoded_as_the_source_has_it(texts):
    """With a class: the first bytes plus one. Without: the token before the text, and its last bytes."""
    option = Stdlib(kind="class", length=5)
    option.targets = "class"
    source = LabelledTexts([torch.tensor(list(b"import os"), dtype=torch.uint8)], [0], 5, 1)
    assert option.encode("import os", None).tolist() == source.fetch(torch.tensor([0]))[0][0].tolist()
    assert option.encode("", None).tolist() == [0]
    assert option.decode([*option.encode("impo", None).tolist(), 0], None) == "impo"
    for label in ("animal", None):
        jsonl = Jsonl(path=str(texts), test=str(texts), label=label, length=200)
        splits = jsonl.load(CPU)
        x, _ = splits.train.fetch(torch.tensor([7]))
        encoded = jsonl.encode(TEXTS[7], splits)
        assert encoded[: x.shape[1]].tolist() == x[0].tolist()
        assert jsonl.decode([*encoded.tolist(), 0, 0] if label else encoded.tolist(), splits) == TEXTS[7]


# --- plain text ---


def test_plain_text_is_read_in_passages_of_whole_lines(tmp_path):
    """Every line is in one passage; the same ones are held out of a file and of a folder with it, whatever else is there."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("".join(text + "\n" for text in TEXTS))
    (tmp_path / "in" / "notes.md").write_text("not read")
    option = TextFiles(path=str(tmp_path / "in" / "a.txt"), length=16, holdout=0.3)
    splits = option.load(CPU)
    train, test = passages_of(splits.train), passages_of(splits.test)
    passages = [*train, *test]
    assert sorted("".join(passages).splitlines()) == sorted(TEXTS)
    assert all(64 <= len(p) < 64 + len(max(TEXTS, key=len)) + 1 and p.endswith("\n") for p in passages)
    (tmp_path / "in" / "b.txt").write_text("something else " * 20)
    folder = TextFiles(path=str(tmp_path / "in"), length=16, holdout=0.3).load(CPU)
    assert set(test) <= set(passages_of(folder.test))
    assert set(train) <= set(passages_of(folder.train))
    x, y = splits.train.fetch(torch.arange(2))
    assert (splits.classes, x[0, 0]) == (257, 256)
    assert bytes(y[0].tolist()).decode() == train[0][:16]
    assert option.encode("ab", splits).tolist() == [256, 97, 98]


def test_what_is_no_plain_text(tmp_path, problems):
    for name, content, says in (("e.txt", b"", "e.txt is empty"), ("l.txt", b"caf\xe9", "l.txt:1: the byte 0xe9 is no UTF-8")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=says):
            TextFiles(path=str(tmp_path / name)).load(CPU)
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match=r"none holds no \.txt file with a text"):
        TextFiles(path=str(tmp_path / "none")).load(CPU)
    assert any(
        p.endswith("set task=language_modelling, or data=jsonl") for p in problems("task=text_classification", "data=text")
    )
    assert "data.path=gone.txt is no file: set it to a .txt file, or a folder of them" in problems(
        "data=text", "data.path=gone.txt"
    )
    assert any("set task=language_modelling, which sets model and loss" in p for p in problems("data=text"))
    assert "data=text needs data.path, a .txt file, or a folder of them" in problems("data=text")


# --- one decoder for every text, with file and line ---


def test_texts_of_other_encodings(tmp_path):
    text = "".join(f"größe {n} ñ\n" for n in range(40))
    lines = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in text.splitlines())
    for name, content, option in (("t.txt", text, TextFiles), ("t.jsonl", lines, Jsonl)):
        path = tmp_path / name
        path.write_text(content, encoding="utf-8")
        expected = option(path=str(path), length=8, holdout=0.4).load(CPU).train.documents.tokens
        for encoding, given in (("utf-8-sig", None), ("utf-16", None), ("latin-1", "latin-1")):
            path.write_bytes(content.encode(encoding))
            assert torch.equal(
                option(path=str(path), length=8, encoding=given, holdout=0.4).load(CPU).train.documents.tokens, expected
            )
        path.write_bytes(content.encode().replace(b" 7 ", b"\xe9"))
        with pytest.raises(
            UserError, match=rf"{name}:8: the byte 0xe9 is no UTF-8: save the file as UTF-8, or name .* data.encoding"
        ):
            option(path=str(path), length=8).load(CPU)
        path.write_bytes(content.encode().replace(b" 7 ", b"\0"))
        with pytest.raises(UserError, match=rf"{name}:8 holds a zero byte: it is no text"):
            option(path=str(path), length=8).load(CPU)


def test_half_of_a_character_in_json_is_named(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n{"text": "b \\ud83d c"}\n')
    with pytest.raises(UserError, match=r"t.jsonl:2: '\\ud83d' is half of a character: mend the text"):
        Jsonl(path=str(tmp_path / "t.jsonl")).load(CPU)


def test_one_long_line_is_cut_at_its_spaces_and_held_out(tmp_path):
    words = " ".join(f"word{n}ß" for n in range(2000))
    (tmp_path / "text8.txt").write_text(words)
    splits = TextFiles(path=str(tmp_path / "text8.txt"), length=16, holdout=0.2).load(CPU)
    train, test = passages_of(splits.train), passages_of(splits.test)
    passages = [*train, *test]
    assert sorted(word for passage in passages for word in passage.split()) == sorted(words.split())
    assert all(64 <= len(passage.encode()) < 80 for passage in passages if not passage.endswith("word1999ß"))
    assert 0 < len(test) < len(train)
    (tmp_path / "text8.txt").write_text("ß" * 1000)  # no space: no character is cut through
    found = {line.text for line in TextFiles(path=str(tmp_path / "text8.txt"), length=16)._read(tmp_path / "text8.txt")}
    assert found == {"ß" * 104, "ß" * 128}


def test_the_texts_of_a_folder_are_read_by_their_ending_and_hidden_ones_are_not(tmp_path):
    for name in ("a.txt", "B.TXT", ".hidden.txt", "__MACOSX/c.txt", ".git/d.txt", "in/e.txt", "f.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = {line.text for line in TextFiles(path=str(tmp_path))._read(tmp_path)}
    assert found == {"a.txt", "B.TXT", "in/e.txt"}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_empty_text_is_encoded(texts, tokenizer):
    for label in ("animal", None):
        option = Jsonl(path=str(texts), test=str(texts), label=label, tokenizer=tokenizer, vocabulary=300)
        assert len(option.encode("", option.load(CPU))) == 1
