"""Byte-level text: what the samples are, and that every token weighs the same wherever it stands."""

import itertools
import math
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
from drivetrain.data.text import BEGIN, VOCABULARY, Stdlib, Texts
from drivetrain.loss.language import NextToken

CPU = torch.device("cpu")
TEXT = ["data=stdlib", "data.root=library", "data.length=16", "data.holdout=0.3", "loss=next_token"]
GPT = [*TEXT, "model=gpt", "model.width=16", "model.depth=2", "model.heads=2"]


@pytest.fixture
def library(tmp_path):
    """Forty files of 1 to 118 bytes in folders of all kinds."""
    root = tmp_path / "library"
    for i in range(40):
        path = root / ("package" if i % 3 else "") / f"m{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes((i + 7 * j) % 256 for j in range(1 + 3 * i)))
    for folder in ("site-packages/foreign", "test", "package/tests"):
        (root / folder).mkdir(parents=True)
        (root / folder / "apart.py").write_bytes(b"apart" * 10)
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
    assert result.status == "completed", result.error
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
    one, two = train(*words), train(*words, "parallel=ddp")
    assert (one.status, two.status, two.world_size) == ("completed", "completed", 2), two.error
    assert one.updates == two.updates == 5
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
