"""Random triples of options: a few here, twenty in the slow suite, thousands by `python -m bench.triples`."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from bench import rows, triples

from tests.support import pairwise


def test_what_becomes_of_a_triple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One trains, one is refused with its reason, one fails and is open."""
    monkeypatch.setattr("drivetrain.optimizer.algorithms.lion.Lion.update", lambda *a: 1 / 0)
    given = [
        ("model=mlp", "clip=value", "ema=ema"),
        ("model=mlp", "loss=next_token", "data=digits"),
        ("model=mlp", "optimizer=lion", "clip=norm"),
    ]
    ended = list(rows.run(enumerate(given), tmp_path))
    assert [each.outcome for each in ended] == ["trained", "refused", "open"], ended
    assert "data=digits" in ended[1].said
    assert "division by zero" in ended[2].said
    found = triples.summary(ended)
    assert (found["triples"], found["trained"], found["refused"], found["open"]) == (3, 1, 1, 1)
    assert [each["words"] for each in found["open_triples"]] == [given[2]]


def test_triples_are_the_same_ones_for_a_seed() -> None:
    def drawn(seed: int) -> list[tuple[str, ...]]:
        return list(itertools.islice(triples.drawn(seed, lambda word: word != "parallel=dp"), 1000))

    found = drawn(1)
    assert found == drawn(1) != drawn(2)
    assert all(len({word.partition("=")[0] for word in words}) == 3 for words in found)
    compiled = [n for n, words in enumerate(found) if set(words) & set(rows.SLOW)]
    assert compiled
    assert all(n % triples.SLOW_IN == 0 for n in compiled)


@pytest.mark.slow
def test_twenty_triples(tmp_path: Path) -> None:
    pairwise.prepare_folder(tmp_path)
    drawn = triples.drawn(triples.SEED, lambda word: pairwise.refused([word], tmp_path) is None, slow=False)
    ended = list(rows.run(enumerate(itertools.islice(drawn, 20)), tmp_path))
    assert len(ended) == 20
    assert not [each for each in ended if each.outcome == rows.OPEN or triples.wrong(each)]
