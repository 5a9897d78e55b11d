"""Any two options go together, or are refused with a reason that names both; a sample here, all of them in the slow suite."""

import itertools
import random
from pathlib import Path

import pytest

from tests.support import pairwise

SAMPLE = 8


def sampled() -> list[tuple[str, str]]:
    """Pairs of options of two groups, the same at every run."""
    groups = pairwise.factors()
    pairs = [p for a, b in itertools.combinations(groups, 2) for p in itertools.product(groups[a], groups[b])]
    quick = [p for p in pairs if not any(word.startswith("compile=") for word in p)]  # a compilation takes half a minute
    return random.Random(0).sample(quick, SAMPLE)


@pytest.mark.parametrize("pair", sampled(), ids=" ".join)
def test_a_pair_trains_or_is_refused_for_both(pair: tuple[str, str], tmp_path: Path) -> None:
    pairwise.prepare_folder(tmp_path)
    came = pairwise.try_one(pair, str(tmp_path))
    assert came.status in ("trained", "refused"), came
    if came.status == "refused":
        by_itself = [word for word in pair if pairwise.refused([word], tmp_path)]
        assert by_itself or pairwise.names_both(frozenset(pair), came.reason), came


def test_every_option_is_in_the_cover() -> None:
    from drivetrain.config.catalog import options

    words = set(itertools.chain(*pairwise.factors().values()))
    alone = {group for group, names in options().items() if len(names) == 1}
    assert len(words) >= sum(len(names) for group, names in options().items() if group not in alone)


@pytest.mark.parametrize(
    "pair", [("loss=distill", "data=digits"), ("loss=distill", "data=wine"), ("optimizer=schedulefree", "ema=ema")]
)
def test_an_option_with_needs_trains(pair: tuple[str, str], tmp_path: Path) -> None:
    """What it wants beside its name is in the table, so that it is not one of those that this machine cannot run."""
    pairwise.prepare_folder(tmp_path)
    came = pairwise.try_one(pair, str(tmp_path))
    assert came.status == "trained", came


def test_a_broken_combination_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: a run that ends without an update, and one that raises."""
    pairwise.prepare_folder(tmp_path)
    monkeypatch.setattr("drivetrain.optimizer.algorithms.lion.Lion.update", lambda *a: 1 / 0)
    assert pairwise.try_one(("optimizer=lion", "clip=norm"), str(tmp_path)).status == "broken"
    assert not pairwise.names_both(frozenset(("optimizer=lion", "clip=norm")), "optimizer=lion is not for today")


@pytest.mark.slow
def test_the_whole_cover() -> None:
    """Writes docs/pairwise.md."""
    assert pairwise.main() == 0
