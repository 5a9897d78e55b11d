"""Large texts are tokenized once into files, and are then the same samples as those read in memory."""

import errno
import json
import logging
import multiprocessing
import os
import pickle
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from drivetrain.cli import main
from drivetrain.core.errors import DataError, UserError
from drivetrain.data import stored
from drivetrain.data import tokenizer as tokens
from drivetrain.data.base import Splits, fingerprint
from drivetrain.data.jsonl import Jsonl, TextFiles
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from tests.data.test_packed import kill_at_each_third_write
from tests.loader.test_loader import requests

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
CPU = torch.device("cpu")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with two plain texts and a file of JSON lines, of all lengths."""
    folder = tmp_path / "texts"
    (folder / "plain").mkdir(parents=True)
    lines = [f"{n} größe " * (1 + n % 23) for n in range(300)]
    for name, part in (("a.txt", lines[:170]), ("b.txt", lines[170:])):
        (folder / "plain" / name).write_text("\n".join(part), encoding="utf-8")
    rows = [json.dumps({"text": line, "kind": "cba"[n % 3]}) for n, line in enumerate([*lines, *lines[:5]])]
    (folder / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return folder


@pytest.fixture
def large(monkeypatch) -> None:
    """Every text is large, and every few documents are written apart."""
    monkeypatch.setattr(tokens, "LARGE", 0)
    monkeypatch.setattr(stored, "CHUNK", 200)


def option(texts: Path, kind: str, **settings) -> Jsonl:
    given = {"cache": str(texts.parent / "cache"), "length": 16, "holdout": 0.2, **settings}
    if kind == "plain":
        return TextFiles(path=str(texts / "plain"), **given)
    return Jsonl(path=str(texts / "rows.jsonl"), label="kind" if kind == "labelled" else None, **given)


def sets(splits: Splits) -> list:
    return [splits.train, *splits.sets("validation").values(), *splits.sets("test").values()]


def assert_same(one: Splits, other: Splits) -> None:
    assert (one.classes, one.names, one.vocabulary, one.files) == (other.classes, other.names, other.vocabulary, other.files)
    for a, b in zip(sets(one), sets(other), strict=True):
        assert len(a) == len(b) > 0
        assert torch.equal(a.lengths, b.lengths)
        for x, y in zip(a.fetch(torch.arange(len(a))), b.fetch(torch.arange(len(b))), strict=True):
            assert torch.equal(x, y)
        assert torch.equal(a.identities(), b.identities())
    assert fingerprint(one.train) == fingerprint(other.train)


@pytest.mark.parametrize("kind", ["plain", "rows", "labelled"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_samples_from_files_are_those_in_memory(texts, kind, tokenizer, monkeypatch):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    made = option(texts, kind, tokenizer=tokenizer, vocabulary=300)
    in_memory = made.load_sets(CPU)
    assert not (texts.parent / "cache").exists()
    monkeypatch.setattr(tokens, "LARGE", 0)
    monkeypatch.setattr(stored, "CHUNK", 200)
    assert_same(made.load_sets(CPU), in_memory)
    monkeypatch.setattr(tokens, "write_set", None)  # the second time nothing is written, nor a tokenizer trained
    again = made.load_sets(CPU)
    assert_same(again, in_memory)
    (kept,) = (p for p in (texts.parent / "cache").iterdir())
    assert {p.name for p in kept.iterdir()} == {"index.json", "texts.data", "texts.table", ".lock"}
    assert_same(pickle.loads(pickle.dumps(again)), in_memory)


def test_other_sets_take_the_tokenizer_and_the_classes_of_training(texts, large):
    pytest.importorskip("tokenizers")
    rows = (texts / "rows.jsonl").read_text().splitlines()
    (texts / "own.jsonl").write_text("\n".join(rows[7:90]))
    given = {"tokenizer": "bpe", "vocabulary": 280, "test": str(texts / "own.jsonl"), "validation": "own.jsonl"}
    splits = option(texts, "labelled", **given).load_sets(CPU)
    assert (splits.names, len(splits.train), len(splits.test)) == (["a", "b", "c"], 305, 83)
    x, y = splits.test.fetch(torch.arange(83))
    same, classes = splits.train.fetch(torch.arange(7, 90))
    assert torch.equal(x, same)
    assert torch.equal(y, classes)
    (texts / "own.jsonl").write_text(rows[0].replace('"c"', '"new"'))
    with pytest.raises(UserError, match=r"own.jsonl:1: no training row has the class new of"):
        option(texts, "labelled", **given).load_sets(CPU)


@pytest.mark.parametrize("kind", ["plain", "labelled"])
def test_a_killed_tokenizing_goes_on_to_the_same_bytes(texts, large, kind, monkeypatch):
    made = option(texts, kind)
    made.load(CPU)
    (whole,) = (texts.parent / "cache").iterdir()
    expected = {p.name: p.read_bytes() for p in whole.iterdir()}
    shutil.rmtree(whole)
    kill_at_each_third_write(monkeypatch)
    attempts = 0
    while not (whole / "index.json").exists():
        attempts += 1
        try:
            made.load(CPU)
        except KeyboardInterrupt:
            for name in ("texts.data", "texts.table"):
                with (whole / name).open("ab") as file:
                    file.write(b"half a row")
    assert attempts > 4
    assert {p.name: p.read_bytes() for p in whole.iterdir()} == expected


def test_who_comes_second_waits_and_writes_nothing(texts, large, monkeypatch):
    made, write, found = option(texts, "rows"), tokens.write_set, list[Splits]()
    second = threading.Thread(target=lambda: found.append(made.load(CPU)))
    written = []

    def write_set(*given):
        if not written:
            second.start()
        written.append(given)
        return write(*given)

    monkeypatch.setattr(tokens, "write_set", write_set)
    first = made.load(CPU)
    second.join()
    assert len(written) == 1
    assert_same(first, found[0])


def test_every_loader_reads_the_same(texts, large):
    source = option(texts, "plain").load_sets(CPU).train
    streams = [
        [(m.x, m.y) for m in loader.stream(Pipeline(source, (), None, 0), list(requests()), CPU, torch.contiguous_format)]
        for loader in (Loader(), Workers(num_workers=2), Threads(num_threads=2))
    ]
    for other in streams[1:]:
        assert all(torch.equal(a, b) for one, two in zip(streams[0], other, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture
def made(texts):
    return option(texts, "rows")


# --- what can go wrong ---


def test_a_file_that_has_changed_is_tokenized_again_which_is_said(texts, large, caplog, made):
    with caplog.at_level(logging.INFO, "drivetrain"):
        before = made.load(CPU)
        assert "rows.jsonl: its 0 MiB are tokenized once, into" in caplog.text
        assert "rows.jsonl: 100 % are tokenized" in caplog.text
        assert "has changed" not in caplog.text
        (texts / "rows.jsonl").write_text((texts / "rows.jsonl").read_text().replace("12 ", "twelve "))
        after = made.load(CPU)
    assert "rows.jsonl has changed since it was tokenized: " in caplog.text
    assert not torch.equal(before.train.documents.tokens, after.train.documents.tokens)
    assert len(list((texts.parent / "cache").iterdir())) == 2
    for settings in ({"length": 24}, {"text": "kind"}, {"holdout": 0.4}):
        option(texts, "rows", **settings).load(CPU)
    assert len(list((texts.parent / "cache").iterdir())) == 4  # the hold-out does not change the tokens of bytes


def test_damaged_files_are_named(texts, large, made):
    made.load(CPU)
    (folder,) = (texts.parent / "cache").iterdir()
    content = bytearray((folder / "texts.data").read_bytes())
    content[3] ^= 4
    (folder / "texts.data").write_bytes(content)
    source = made.load(CPU).train
    with pytest.raises(DataError, match=r"texts\.data has a sample, number 0, that is not .*: remove .* and make it anew"):
        source.fetch(torch.arange(len(source)))
    assert main.main(["pack", "--verify", str(folder)]) == 2
    for name, more in (("texts.data", b"12345678"), ("texts.table", b"")):
        (folder / name).write_bytes(more + (folder / name).read_bytes()[::-1])
        with pytest.raises(DataError, match=rf"{name} .*: remove .* and make it anew"):
            made.load(CPU)
    (folder / "texts.table").unlink()
    with pytest.raises(DataError, match=r"texts\.table cannot be read \(No such file or directory\): remove .* and make it anew"):
        made.load(CPU)
    (folder / "index.json").write_text("{}")
    with pytest.raises(UserError, match=r"index\.json is no index that drivetrain wrote: remove"):
        made.load(CPU)


def test_a_cache_that_cannot_be_written(texts, large, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file/.* cannot be written \(Not a directory\): set data\.cache to a folder for tokens"):
        option(texts, "rows", cache=str(tmp_path / "file")).load(CPU)
    monkeypatch.setenv("XDG_CACHE_HOME", "no/absolute/path")
    with pytest.raises(UserError, match=r"there is no folder to keep the tokens of large texts in: set data\.cache to one"):
        option(texts, "rows", cache=None).load(CPU)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored.os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\): make room, or .*data\.cache"):
        option(texts, "rows").load(CPU)
    monkeypatch.undo()
    assert_same(option(texts, "rows").load(CPU), option(texts, "rows", cache=str(tmp_path / "other")).load(CPU))


def test_texts_need_no_packing(texts, refused):
    assert "large texts are tokenized once by themselves" in refused("pack", texts / "rows.jsonl", texts / "out", "data=jsonl")


# --- a cache that is not what was written ---


def all_samples(splits: Splits) -> list[list[torch.Tensor]]:
    return [[x.clone() for x in part.fetch(torch.arange(len(part)))] for part in sets(splits)]


def flips(files: Sequence[Path], number: int, seed: int) -> Iterator[tuple[Path, bytes]]:
    """Each file shortened, then with one bit that is another, at drawn places; as its bytes."""
    draw = random.Random(seed)
    for n in range(number):
        path = files[n % len(files)]
        content = bytearray(path.read_bytes())
        at = draw.randrange(len(content))
        content[at] ^= 1 << draw.randrange(8)
        yield path, bytes(content[:at] if n % 4 == 3 else content)


@pytest.mark.parametrize("number", [24, pytest.param(2_000, marks=pytest.mark.slow)])
def test_a_changed_cache_is_refused_or_gives_the_same_samples(texts, large, number):
    made = option(texts, "labelled")
    expected = all_samples(made.load_sets(CPU))
    (folder,) = (texts.parent / "cache").iterdir()
    files, refused = [folder / name for name in ("index.json", "texts.data", "texts.table")], 0
    for path, content in flips(files, number, 5):
        before = path.read_bytes()
        path.write_bytes(content)
        said, found = "", expected
        try:
            found = all_samples(made.load_sets(CPU))
        except UserError as error:
            said = str(error)
        refused += str(folder) in said
        if not said:  # it was in what is only told of the texts
            assert path.name == "index.json"
            assert all(
                torch.equal(x, y) for one, other in zip(expected, found, strict=True) for x, y in zip(one, other, strict=True)
            )
        path.write_bytes(before)
    assert refused > number / 2


def test_a_cache_of_other_texts_is_refused(texts, large):
    """A folder that was copied over another one: its hashes are right."""
    option(texts, "labelled").load_sets(CPU)
    (first,) = (texts.parent / "cache").iterdir()
    (texts / "rows.jsonl").write_text("\n".join((texts / "rows.jsonl").read_text().splitlines()[9:]))
    option(texts, "labelled").load_sets(CPU)
    (second,) = {*(texts.parent / "cache").iterdir()} - {first}
    shutil.rmtree(second)
    shutil.copytree(first, second)
    with pytest.raises(UserError, match=r"index.json is that of other texts: remove"):
        option(texts, "labelled").load_sets(CPU)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": 999}, "of version 999"),
        ({"dtype": "object"}, "dtype"),
        ({"names": None, "key": 7}, "key"),
        (None, "no index"),
    ],
)
def test_an_index_of_another_version_or_form_is_refused(texts, large, change, says, made):
    made.load_sets(CPU)
    (index,) = (texts.parent / "cache").glob("*/index.json")
    index.write_text("{" if change is None else json.dumps({**json.loads(index.read_text()), **change}))
    with pytest.raises(UserError, match=says):
        made.load_sets(CPU)


@pytest.mark.parametrize(
    "journal", [{"bytes": "ab"}, {"bytes": [1]}, {"samples": "3"}, {"names": [1]}, {"bytes": [-1, 0]}, "[]", "{"]
)
def test_a_journal_of_another_form_is_refused(texts, large, journal, monkeypatch, made):
    monkeypatch.setattr(tokens, "write_index", None)
    with pytest.raises(TypeError):
        made.load_sets(CPU)
    (path,) = (texts.parent / "cache").glob("*/*.journal")
    path.write_text(journal if isinstance(journal, str) else json.dumps({**json.loads(path.read_text()), **journal}))
    with pytest.raises(UserError, match="is damaged"):
        made.load_sets(CPU)


def test_several_writers_at_once_make_one_cache(texts, large):
    made, fork = option(texts, "labelled"), multiprocessing.get_context("fork")
    several = [fork.Process(target=made.load_sets, args=(CPU,)) for _ in range(3)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert [each.exitcode for each in several] == [0, 0, 0]
    assert len(all_samples(made.load_sets(CPU))[0][0]) > 100
    assert len([*(texts.parent / "cache").iterdir()]) == 1


def test_a_full_disk_and_a_cache_that_is_no_folder(texts, large, monkeypatch):
    (texts.parent / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\): set data.cache"):
        option(texts, "rows", cache=str(texts.parent / "file")).load_sets(CPU)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\): make room"):
            option(texts, "rows").load_sets(CPU)
    assert len(all_samples(option(texts, "rows").load_sets(CPU))[0][0]) > 100  # it goes on


# --- trained ---


def test_a_run_on_files_is_the_run_in_memory(texts, train, monkeypatch):
    words = [
        "task=language_modelling", "model=gpt", "loss=next_token", "data=text",
        f"data.path={texts / 'plain'}", f"data.cache={texts.parent / 'cache'}",
        "data.length=16", "model.width=16", "model.depth=1", "loader=workers", "loader.num_workers=1",
    ]  # fmt: skip
    in_memory = train(*words)
    monkeypatch.setattr(tokens, "LARGE", 0)
    assert train(*words).judged("final") == in_memory.judged("final")
    assert (texts.parent / "cache").is_dir()
