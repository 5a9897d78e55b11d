"""Any two options go together, or are refused with a reason that names both: a sample. `python -m bench.pairwise` tries all."""

import itertools
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from bench import pairwise as campaign

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


def test_rows_cover_all_pairs_that_the_rules_allow() -> None:
    """Also where three options are refused of which any two train."""
    groups = {group: [f"{group}={n}" for n in range(4)] for group in "abcde"}
    pairs = {frozenset(pair) for pair in campaign.all_pairs(list(groups.values()))} - {frozenset(("a=1", "b=1"))}
    cover = campaign.Cover(pairs, groups, lambda row: {"a=0", "b=0", "c=0"} <= set(row))
    rows = list(cover)
    assert set().union(*map(campaign.pairs_of, rows)) == pairs
    assert len(rows) < len(pairs) / 5
    assert not [row for row in rows if {"a=0", "b=0", "c=0"} <= set(row)]


@pytest.mark.parametrize("culprits", [("b", "d"), ("a", "e", "c"), ("a", "b")])
def test_the_words_that_make_a_row_fail_are_found(culprits: tuple[str, ...]) -> None:
    found = campaign.cause(("a", "b", "c", "d", "e"), lambda words: set(culprits) <= set(words))
    assert sorted(found) == sorted(culprits)


def test_the_campaign_covers_two_groups(tmp_path: Path) -> None:
    """One pair is refused by the rules, one fails when it runs, and the journal keeps what has been tried.

    In a process of its own: rows are forked, and a test before this one may have run a backward on a device.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(_campaign_of_two_groups, tmp_path).result()


def _campaign_of_two_groups(folder: Path) -> None:
    pairwise.prepare_folder(folder)
    groups = {
        "optimizer": ["optimizer=lion", "optimizer=sgd"],
        "data": ["data=digits", "data=wine"],
        "loss": ["loss=cross_entropy"],
    }
    pairs = {frozenset(pair) for pair in campaign.all_pairs(list(groups.values()))}
    asked = campaign.Asked({}, {}, pairs)

    def run() -> campaign.Campaign:
        cover = campaign.Cover(pairs, groups, lambda words: pairwise.refused(words, folder))
        found = campaign.Campaign(folder, cover, folder / "journal", 1)
        found.resume()
        found.run(100)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.optimizer.algorithms.lion.Lion.update", lambda *a: 1 / 0)
        done = run()
        assert done.trained() == {pair for pair in pairs if "optimizer=lion" not in pair}
        assert "3 not tried yet" in campaign.document(asked, groups, done)
        assert len(run().ended) == len(done.ended)
