"""batch.tokens: updates of as many tokens, whatever the lengths; ranks and micro-batches only split them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from drivetrain.batch import Batch
from drivetrain.batch.base import Accumulate
from drivetrain.core.errors import UserError
from drivetrain.core.order import shuffled
from drivetrain.core.world import World
from tests.batch.test_bucketed import Lengths, epoch, updates

TOKENS = 1000


def of_tokens(source: Lengths, size: int = 1, **settings) -> Batch:
    batch = Accumulate(**{"tokens": TOKENS, "accumulation_steps": 1, **settings}).over(shuffled(len(source)))
    batch.measure(source, 0, World(0, size))
    return batch


@pytest.mark.parametrize(("size", "steps"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("drop_last", [True, False])
def test_every_update_has_as_many_tokens_and_every_epoch_as_many_updates(size, steps, drop_last):
    source = Lengths()
    total, longest = int(source.lengths.sum()), int(source.lengths.max())
    wanted = total // TOKENS if drop_last else math.ceil(total / TOKENS)
    before = 0
    for number in range(3):
        batch = of_tokens(source, size, accumulation_steps=steps)
        ranks = epoch(batch, len(source), size, number, drop_last)
        found = updates(ranks)
        assert len(found) == wanted == batch.updates(len(source), number, drop_last)
        assert all(abs(int(source.lengths[u].sum()) - TOKENS) < longest for u in found[:-1])
        assert found == updates(epoch(of_tokens(source), len(source), 1, number, drop_last)), "ranks only split"
        for window in (0, 1, wanted):
            assert batch.consumed(len(source), number, window, drop_last) == before + sum(map(len, found[:window]))
        before += sum(map(len, found))
        assert drop_last or sorted(i for u in found for i in u) == list(range(len(source)))
        for together in zip(*ranks, strict=True):
            assert len({len(mine) for mine in together}) == 1, "forwards may wait for each other"
            tokens = [int(source.lengths[r.indices].sum()) for mine in together for r in mine if r.weight]
            weights = [r.weight for mine in together for r in mine if r.weight]
            assert weights == pytest.approx([size * n / sum(tokens) for n in tokens])
    assert of_tokens(source).total_updates(len(source), 3, drop_last) == 3 * wanted


def test_going_on_at_update_k_gives_what_the_whole_epoch_gives_from_there():
    source = Lengths()
    batch = of_tokens(source, 2, accumulation_steps=2)
    whole, rest = (updates(epoch(batch, len(source), 2, 1, skip=k)) for k in (0, 4))
    assert rest == whole[4:] != []


def test_it_grows():
    source = Lengths()
    batch = of_tokens(source, grow_every=1)
    total = int(source.lengths.sum())
    assert [batch.updates(len(source), e, True) for e in range(3)] == [total // (TOKENS << e) for e in range(3)]


def test_an_evaluation_has_as_many_tokens_at_once_as_a_micro_batch():
    source = Lengths()
    batches = of_tokens(source, accumulation_steps=2).evaluation(source, World())
    assert sorted(torch.cat(list(batches)).tolist()) == list(range(len(source)))
    assert max(len(b) * int(source.lengths[b].max()) for b in batches) <= TOKENS // 2


def test_less_than_the_longest_sample_is_refused():
    with pytest.raises(UserError, match=r"batch\.tokens=20 is less than the longest sample, of 25\d tokens"):
        of_tokens(Lengths(), tokens=20)


LANGUAGE = ["data=jsonl", "data.path=texts.jsonl", "data.length=32", "loss=next_token", "model=gpt", "model.width=16",
            "model.heads=2", "batch.tokens=300", "updates=4"]  # fmt: skip


@pytest.fixture(autouse=True)
def _texts(tmp_path):
    """Texts of 4 to 30 bytes."""
    (tmp_path / "run").mkdir()  # of what `make` builds
    texts = [f"{n:03d} {'ab' * (n * 7 % 14)}" for n in range(200)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_accumulated_it_is_the_update_of_the_whole_and_the_run_goes_on_where_it_stopped(float64, make):
    """The mean over all tokens of the update: of one forward, or of three of unlike lengths."""
    whole, parts = make(*LANGUAGE), make(*LANGUAGE, "batch=accumulate", "batch.accumulation_steps=3")
    losses = []
    for trainer in (whole, parts):
        trainer.fit()
        losses.append([r["loss"] for r in trainer.log.writers[0] if r["event"] == "train"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert len(losses[0]) == 4


def test_more_tokens_than_there_are_is_refused(make):
    with pytest.raises(UserError, match=r"batch\.tokens=\d+ is more than the training samples have"):
        make(*LANGUAGE, "batch.tokens=100000000", "data.drop_last=true")
