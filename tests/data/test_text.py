"""Texts: bytes of files and lines, their tokenizers, pieces with a class; and every token weighs the same wherever it stands."""

import functools
import itertools
import json
import math
import os
import sysconfig
from pathlib import Path

import pytest
import torch

from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.batch.bucketed import Bucketed
from drivetrain.core.errors import UserError
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from drivetrain.data.base import IGNORE_INDEX
from drivetrain.data.jsonl import Jsonl, TextFiles
from drivetrain.data.text import BEGIN, VOCABULARY, LabelledTexts, Stdlib, Texts
from drivetrain.data.tokenizer import BytePairs, from_json
from drivetrain.loss.language import NextToken
from drivetrain.model.shipped import Gpt
from tests.support.put import put

CPU = torch.device("cpu")
TEXT = ["data=stdlib", "data.root=library", "data.length=16", "data.holdout=0.3", "loss=next_token"]
GPT = [*TEXT, "model=gpt", "model.width=16", "model.depth=2", "model.heads=2"]


@pytest.fixture
def library(tmp_path):
    """Forty files of 1 to 118 bytes in folders of all kinds."""
    root = tmp_path / "library"
    for i in range(40):
        path = root / ("package" if i % 3 else "") / f"m{i}.py"
        put(path, bytes((i + 7 * j) % 256 for j in range(1 + 3 * i)))
    for folder in ("site-packages/foreign", "test", "package/tests"):
        put(root / folder / "apart.py", b"apart" * 10)
    (root / "empty.py").write_bytes(b"")
    (root / "notes.txt").write_bytes(b"no Python")
    return root


def content(source: Texts) -> list[bytes]:
    """A source's documents, put together from its samples."""
    documents: list[bytes] = []
    for i in range(len(source)):
        x, y = source.fetch(torch.tensor([i]))
        if x[0, 0] == BEGIN:
            documents.append(b"")
        else:  # a piece goes on where the one before it ended
            assert x[0, 0] == documents[-1][-1]
        documents[-1] += bytes(y[0].tolist())
        assert x[0, 1:].tolist() == y[0, :-1].tolist()
    return documents


# --- what the samples are ---


def test_every_byte_of_every_document_is_a_target_once():
    documents = [b"a", b"0123456789", b"01234567", b"x" * 17]
    source = Texts(documents, 8)
    assert source.lengths.tolist() == [1, 8, 2, 8, 8, 8, 1]
    assert content(source) == documents


def test_files_are_held_out_by_name_and_each_is_on_one_side(library):
    splits = Stdlib(root=str(library), length=16, holdout=0.3).load(CPU)
    train, test = content(splits.train), content(splits.test)
    written = [p.read_bytes() for p in library.rglob("m*.py")]
    assert sorted(train + test) == sorted(written)
    assert 4 <= len(test) <= 20
    fewer = Stdlib(root=str(library), length=16, holdout=0.2).load(CPU)
    assert set(content(fewer.test)) < set(test)  # a file's side is its own, whatever the others'
    assert (splits.shape, splits.classes, splits.dtype) == ((16,), VOCABULARY, torch.int64)


def test_tests_come_in_where_asked_for_and_site_packages_never(library):
    splits = Stdlib(root=str(library), length=64, holdout=0.3, tests=True).load(CPU)
    assert (content(splits.train) + content(splits.test)).count(b"apart" * 10) == 2


def test_fewer_files_are_still_of_both_sides(library):
    splits = Stdlib(root=str(library), length=16, holdout=0.3, max_files=10).load(CPU)
    train, test = content(splits.train), content(splits.test)
    assert len(train) + len(test) == 10
    assert test
    assert train


def test_an_evaluation_on_fewer_pieces_takes_them_from_all_files(library):
    asked = {"root": str(library), "length": 16, "holdout": 0.3, "validation": None}
    whole, some = (Stdlib(**asked, test_samples=most).load_sets(CPU).test for most in (None, 5))
    assert len(some) == 5
    expected = torch.tensor([i * len(whole) // 5 for i in range(5)])
    assert torch.equal(some.fetch(torch.arange(5))[0], whole.fetch(expected)[0])
    assert torch.equal(some.lengths, whole.lengths[expected])


@pytest.mark.slow
def test_pythons_own_library_is_there():
    splits = Stdlib(max_files=12).load(CPU)
    first = splits.train.fetch(torch.arange(len(splits.train)))[1]
    assert len(splits.train) > 12
    root = Path(sysconfig.get_paths()["stdlib"])
    assert bytes(first[0, :20].tolist()) in {p.read_bytes()[:20] for p in root.rglob("*.py")}


def test_a_batch_is_padded_on_the_right_with_targets_that_count_nothing():
    source = Texts([b"abc", b"0123456789"], 16)
    x, y = source.fetch(torch.tensor([0, 1]))
    assert x.shape == y.shape == (2, 10)
    assert y[0].tolist() == [*b"abc", *[IGNORE_INDEX] * 7]
    assert x[0, 3:].tolist() == [0] * 7
    assert [source.fetch(torch.tensor([i]), 4)[0].shape[1] for i in (0, 1)] == [4, 10]  # no more than the longest there is


# --- the loss ---


def test_the_loss_is_the_mean_over_the_tokens_that_count():
    logits = torch.tensor([[[2.0, 0, 0], [0, 0, 0]], [[0, 1.0, 0], [9.0, 9, 0]]])
    target = torch.tensor([[0, 2], [0, IGNORE_INDEX]])
    by_hand = [math.log(math.exp(2) + 2) - 2, math.log(3), math.log(math.e + 2)]
    loss = NextToken()
    assert loss(logits, target).item() == pytest.approx(sum(by_hand) / 3, rel=1e-6)
    total, bits, count = loss.sums(logits, target).tolist()
    assert (total, bits) == (pytest.approx(sum(by_hand), rel=1e-6), pytest.approx(sum(by_hand) / math.log(2), rel=1e-6))
    assert count == 3
    assert loss(logits.bfloat16(), target).item() == pytest.approx(sum(by_hand) / 3, rel=1e-6)  # these logits are exact


# --- every token weighs the same ---


def gradients(trainer, batch, world: World, drop_last: bool = False) -> list[dict[str, torch.Tensor]]:
    """The gradients of each update of an epoch, as one rank makes them; weights stay."""
    samples, found = len(trainer.train_data.source), []
    requests = batch.over(shuffled(samples)).requests(trainer.seed, 0, world, drop_last)
    for micro in trainer.loader.stream(trainer.train_data, requests, CPU, torch.contiguous_format):
        trainer.step.micro_batch(micro, torch.zeros(()))
        if micro.last:
            found.append({name: p.grad.clone() for name, p in trainer.model.named_parameters()})
            trainer.step.zero_grad()
    return found


@pytest.mark.parametrize("option", ["accumulate", "bucketed"])
def test_three_steps_on_two_ranks_equal_one_big_batch(float64, make, library, option):
    trainer = make(*GPT, f"batch={option}", "batch.accumulation_steps=3", "batch.global_batch=30", "parallel=single")
    with torch.no_grad():  # blocks begin as the identity: move them, so that all of them count
        for p in trainer.model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    big: Batch = Batch(30) if option == "accumulate" else Bucketed(30, pad_to=trainer.batch.pad_to)
    big = big.over(trainer.batch.order)
    big.measure(trainer.train_data.source, 0, World())
    whole = gradients(trainer, big, World())
    ranks = [gradients(trainer, trainer.batch, World(rank, 2)) for rank in range(2)]
    assert len(whole) == len(ranks[0]) == len(ranks[1]) == -(-len(trainer.train_data.source) // 30) > 2
    for one, *parts in zip(whole, *ranks, strict=True):
        for name, expected in one.items():
            mean = sum(part[name] for part in parts) / 2  # DDP's
            torch.testing.assert_close(mean, expected, rtol=1e-10, atol=1e-13)
            assert expected.abs().max() > 0


def test_samples_alone_would_weigh_them_wrongly(float64, make, library):
    """The test above sees the difference."""
    trainer = make(*GPT, "batch=accumulate", "batch.accumulation_steps=3", "batch.global_batch=30")
    right = gradients(trainer, trainer.batch, World())
    trainer.batch.lengths = None
    wrong = gradients(trainer, trainer.batch, World())
    name = "embedding.weight"
    assert not torch.allclose(right[0][name], wrong[0][name], rtol=1e-3, atol=1e-6)


def test_the_weights_of_an_update_sum_to_the_ranks(library):
    source = Stdlib(root=str(library), length=16, holdout=0.3).load(CPU).train
    batch = Accumulate(12, accumulation_steps=2)
    batch.measure(source, 0, World())
    ranks = [list(batch.over(shuffled(len(source))).requests(0, 0, World(rank, 2), False)) for rank in range(2)]
    ends = [0, *(i for i, r in enumerate(ranks[0], 1) if r.last)]
    updates = [[r for mine in ranks for r in mine[a:b]] for a, b in itertools.pairwise(ends)]
    for update in updates:
        tokens = source.lengths[torch.cat([r.indices for r in update])].sum()
        assert sum(float(r.weight) for r in update) == pytest.approx(2)
        for r in update:
            assert float(r.weight) == pytest.approx(2 * float(source.lengths[r.indices].sum() / tokens), rel=1e-6)


# --- trained ---


def test_it_trains_and_reports_bits_per_byte(train, library):
    result = train(*GPT, "optimizer=adamw", "optimizer.lr=0.01", "epochs=3", "updates=null")
    final, best = result.judged("final"), result.judged("best")
    assert final["bits_per_byte"] == pytest.approx(final["loss"] / math.log(2))
    assert final["bits_per_byte"] < 8
    assert best["bits_per_byte"] <= final["bits_per_byte"]


@pytest.mark.slow
def test_two_ranks_train_and_evaluate_as_one(train, library):
    words = [
        *GPT,
        "batch=bucketed",
        "batch.accumulation_steps=3",
        "data.drop_last=false",
        "epochs=2",
        "updates=5",
        "model.ngrams=2",
    ]
    one, two = train(*words, updates=5), train(*words, "parallel=ddp", updates=5)
    assert two.world_size == 2
    assert two.judged("final")["loss"] == pytest.approx(one.judged("final")["loss"], rel=1e-5)


# --- refused ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["data=stdlib", "loss=next_token"],
            "model=mlp does not read sequences of tokens, which data=stdlib gives: set model=gpt",
        ),
        (
            ["data=stdlib", "model=gpt"],
            "loss=cross_entropy wants one class for each sample or a class for each pixel, but data=stdlib has the next token",
        ),
        (["model=gpt", "loss=next_token"], "model=gpt reads sequences of tokens, which data=synthetic does not give"),
        (
            ["loss=next_token"],
            "loss=next_token wants the next token at each position, but data=synthetic has one class for each sample",
        ),
        (["data=stdlib", "augment=[flip_crop]"], "augment=[flip_crop] changes images, but data=stdlib is text"),
        (["data=stdlib", "data.root=/nowhere"], "data.root=/nowhere is no directory"),
    ],
    ids=lambda v: "+".join(v) if isinstance(v, list) else "",
)
def test_text_wants_its_model_and_loss_and_images_theirs(problems, words, says):
    assert any(problem.startswith(says) for problem in problems(*words))


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"0 training and 0 test \.py files"):
        Stdlib(root=str(tmp_path)).load(CPU)
    for number in range(30):
        (tmp_path / "only").mkdir(exist_ok=True)
        (tmp_path / "only" / f"m{number}.py").write_text("x = 1")
    with pytest.raises(UserError, match=r"1 packages have at least \d+ files, and two are needed to tell them apart"):
        Stdlib(root=str(tmp_path), kind="class").load(CPU)


TEXTS = [f"the {'cat' if i % 2 else 'dog'} number {i} sat on the mat, and then the mat sat on it" for i in range(80)]


def passages_of(source) -> list[str]:
    """The texts of a source whose tokens are bytes."""
    parts = source.documents.tokens.split(source.documents.sizes.tolist())
    return [bytes(parts[n].tolist()).decode() for n in source.which.tolist()]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = (json.dumps({"text": t, "animal": "cat" if "cat" in t else "dog"}) for t in TEXTS)
    return put(tmp_path / "texts.jsonl", "\n".join(lines) + "\n")


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
    file = put(texts.parent / "tokenizer.json", splits.files["tokenizer.json"])
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
        assert splits.names[y[0]] in bytes((x[0][x[0] > 0] - 1).tolist()).decode()


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
    put(tmp_path / "in" / "a.txt", "".join(text + "\n" for text in TEXTS))
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
            UserError, match=rf"{name}:8: the byte 0xe9 is no UTF-8: save the file as UTF-8, or set data.encoding"
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
        put(tmp_path / name, name)
    found = {line.text for line in TextFiles(path=str(tmp_path))._read(tmp_path)}
    assert found == {"a.txt", "B.TXT", "in/e.txt"}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_empty_text_is_encoded(texts, tokenizer):
    for label in ("animal", None):
        option = Jsonl(path=str(texts), test=str(texts), label=label, tokenizer=tokenizer, vocabulary=300)
        assert len(option.encode("", option.load(CPU))) == 1


TOKENS = {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"type": "BPE", "vocab": {**TOKENS, "z": 10**9}, "merges": []}}, "a number of 10 digits"),
        ({"added_tokens": [{"id": 10**8, "content": "<q>"}]}, "a number of 9 digits"),
        ({"model": {"type": "BPE", "vocab": {**TOKENS, "z": -1}, "merges": []}}, "is no tokenizer"),
        ({"model": None}, "is no tokenizer"),
        (
            {"normalizer": functools.reduce(lambda n, _: {"type": "Sequence", "normalizers": [n]}, range(300), {})},
            "is no tokenizer",
        ),
        ("[]", "is no tokenizer"),
        ('{"a":' * 100_000, "is no tokenizer"),
        (b"\xff\x00", "is no tokenizer"),
        (None, "is no tokenizer"),
    ],
)
def test_a_strangers_tokenizer_is_refused_before_it_takes_memory(tmp_path, change, says):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    whole = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": TOKENS, "merges": []}}
    if change is None:
        os.mkfifo(path)
    else:
        text = json.dumps({**whole, **change}) if isinstance(change, dict) else change
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=says):
        BytePairs.loaded(path)
    path.unlink()
    path.write_text(json.dumps(whole))
    assert BytePairs.loaded(path).size == 2
