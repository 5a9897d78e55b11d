"""`python -m bench.pairwise`: every pair of options of two groups, trained together or refused with a reason that names both.

Rows of many options cover the pairs (`bench.rows` runs them); a pair whose row fails is tried by itself. Writes
docs/pairwise.md. With a journal the campaign can be broken off and gone on with.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.support import composed, pairwise
from tests.support.pairwise import Pair

from bench import harness
from bench.rows import OPEN, REFUSED, SLOW, TRAINED, Ended, Words, before, keep, run

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Asked:
    """What the rules say: options that cannot run on this machine, pairs that cannot be together, and pairs that are to train."""

    alone: dict[str, str] = field(default_factory=dict)
    together: dict[Pair, str] = field(default_factory=dict)
    allowed: set[Pair] = field(default_factory=set)


def ask(folder: Path, groups: dict[str, list[str]], workers: int) -> Asked:
    """Ask the rules about every option and every pair."""
    words = list(itertools.chain(*groups.values()))
    with ProcessPoolExecutor(workers, get_context("spawn"), composed.install) as pool:
        said = pool.map(pairwise.refused, [[word] for word in words], itertools.repeat(folder), chunksize=16)
        alone = {word: reason for word, reason in zip(words, said, strict=True) if reason}
        able = [[word for word in options if word not in alone] for options in groups.values()]
        pairs = all_pairs(able)
        said = pool.map(pairwise.refused, pairs, itertools.repeat(folder), chunksize=64)
        together = {frozenset(pair): reason for pair, reason in zip(pairs, said, strict=True) if reason}
    return Asked(alone, together, {frozenset(pair) for pair in pairs} - set(together))


def all_pairs(groups: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """All pairs of words of two groups."""
    return [pair for a, b in itertools.combinations(groups, 2) for pair in itertools.product(a, b)]


class Cover:
    """Draws rows until every allowed pair has been in one: each row holds as many open pairs as fit.

    Slow options come last, so that few rows have them.
    """

    def __init__(self, allowed: set[Pair], groups: dict[str, list[str]], refused: Callable[[Words], object]) -> None:
        self.allowed, self.open, self.refused = allowed, set(allowed), refused
        self.groups, self.dice = groups, random.Random(0)
        self.bad: list[set[str]] = []  # words that fail together

    def __iter__(self) -> Iterator[Words]:
        for slow in (False, True):
            while left := sorted(sorted(p) for p in self.open if slow or not p & set(SLOW)):
                row = self._row(self.dice.choice(left), slow)
                self.open -= pairs_of(row)
                yield row

    def failed(self, row: Words, cause: Words) -> None:
        """A row did not train because of these words: its other pairs are open again."""
        self.bad.append(set(cause))
        self.open |= (pairs_of(row) & self.allowed) - {frozenset(cause)}

    def _row(self, pair: list[str], slow: bool) -> Words:
        """A pair and what goes with it: of each other group the option with most open pairs."""
        row = list(pair)
        others = [group for group in self.groups if group not in {word.partition("=")[0] for word in row}]
        self.dice.shuffle(others)
        for group in others:
            fitting = [w for w in self.groups[group] if (slow or w not in SLOW) and self._fits(w, row)]
            gained = {word: sum(frozenset((word, other)) in self.open for other in row) for word in fitting}
            if gained and (most := max(gained.values())):
                row.append(self.dice.choice([word for word in fitting if gained[word] == most]))
        # Three options can be refused where no two of them are.
        while len(row) > 2 and self.refused(tuple(row)):
            del row[fewest(lambda n: bool(self.refused(tuple(row[:n]))), len(row)) - 1]
        return tuple(row)

    def _fits(self, word: str, row: Sequence[str]) -> bool:
        words = {word, *row}
        return all(frozenset((word, other)) in self.allowed for other in row) and not any(bad <= words for bad in self.bad)


def fewest(fails: Callable[[int], bool], size: int) -> int:
    """The smallest number from 3 to `size` that fails, where `size` does and each larger one than it."""
    good = 2
    while size - good > 1:
        middle = (good + size) // 2
        good, size = (good, middle) if fails(middle) else (middle, size)
    return size


def cause(row: Words, fails: Callable[[Words], bool]) -> Words:
    """The words of a failing row without which it does not fail; two at least."""
    rest, found = list(row), []
    while not (len(found) > 1 and fails(tuple(found))):
        good, bad = 0, len(rest)  # how many of the rest it takes beside what is found
        while bad - good > 1:
            middle = (good + bad) // 2
            enough = len(found) + middle > 1 and fails((*found, *rest[:middle]))
            good, bad = (good, middle) if enough else (middle, bad)
        if not rest:
            break
        found.append(rest[bad - 1])
        rest = rest[: bad - 1]
    return tuple(found)


def pairs_of(row: Words) -> set[Pair]:
    """The pairs in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


@dataclass
class Campaign:
    """The rows that ended, and what is left to try."""

    folder: Path
    cover: Cover
    journal: Path | None
    jobs: int
    ended: list[Ended] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Try rows until all pairs have trained or failed by themselves, or the time is up."""
        for each in run(enumerate(self.cover, len(self.ended)), self.folder, self.jobs, seconds):
            self.note(each)
            if each.outcome != TRAINED:
                self.cover.failed(each.words, cause(self._fewer(each), self._fails))

    def note(self, each: Ended) -> None:
        """Keep what a row came to."""
        self.ended.append(each)
        keep(each, self.journal)
        print(f"{len(self.cover.open)} open, {each.outcome}, {each.cpu:.1f} s: {' '.join(each.words)} {each.said}", flush=True)

    def _fewer(self, failed: Ended) -> Words:
        """Fewer of a failed row's words that fail as well, where they are found at once: without the slow ones, or as it says."""
        words = failed.words
        quick = tuple(word for word in words if word not in SLOW)
        for fewer in (quick, tuple(word for word in quick if self._is_named(word, failed.said))):
            if 1 < len(fewer) < len(words) and self._fails(fewer):
                words = fewer
        return words

    def _is_named(self, word: str, said: str) -> bool:
        return any(each in said for each in (word, *pairwise.needs(self.folder).get(word, [])))

    def _fails(self, words: Words) -> bool:
        each = next(run([(len(self.ended), words)], self.folder))
        self.note(each)
        return each.outcome != TRAINED

    def resume(self) -> None:
        """What has ended by the journal is not tried again."""
        self.ended += before(self.journal)
        self.cover.open -= self.trained()
        for each in self.ended:
            if each.outcome != TRAINED and len(each.words) == 2:
                self.cover.bad.append(set(each.words))
                self.cover.open.discard(frozenset(each.words))

    def trained(self) -> set[Pair]:
        """The pairs that have trained together in some row."""
        return {pair for each in self.ended if each.outcome == TRAINED for pair in pairs_of(each.words)} & self.cover.allowed


def document(asked: Asked, groups: dict[str, list[str]], campaign: Campaign) -> str:
    """docs/pairwise.md."""
    pairs = all_pairs(list(groups.values()))
    trained, refused = campaign.trained(), refusals(asked, campaign)
    alone = sum(any(word in asked.alone for word in pair) for pair in pairs)
    left = len(pairs) - len(trained) - len(refused) - alone
    lines = [
        "# Which options go together", "",
        f"{len(pairs)} pairs of options: {len(trained)} trained together, two updates and a save; {len(refused)} refused",
        f"with a reason that names both, {alone} with an option that this machine cannot run, {left} not tried yet, or listed",
        "as open at the end.",
        f"{len(campaign.ended)} runs covered them.",
        "", f"Written by `python -m bench.pairwise` on a CPU ({harness.machine()['cpu']}).",
        "", "## Refused together", "", "| pair | reason |", "|---|---|",
    ]  # fmt: skip
    lines += [f"| {' · '.join(sorted(pair))} | {' '.join(refused[pair].split())} |" for pair in sorted(refused, key=sorted)]
    lines += ["", "## Not on this machine", "", "| option | reason |", "|---|---|"]
    lines += [f"| {w} | {' '.join(r.split())} |" for w, r in asked.alone.items()]
    lines += ["", "## Tried", "", "| group | options |", "|---|---|"]
    lines += [f"| {group} | {' '.join(words)} |" for group, words in groups.items()]
    if broken := [each for each in campaign.ended if each.outcome == OPEN]:
        lines += ["", "## Open", ""] + [f"- `{' '.join(each.words)}`: {' '.join(each.said.split())}" for each in broken]
    return "\n".join(lines) + "\n"


def refusals(asked: Asked, campaign: Campaign) -> dict[Pair, str]:
    """The refused pairs with their reasons: by the rules, or by themselves when they were to train."""
    told = {frozenset(each.words): each.said for each in campaign.ended if each.outcome == REFUSED and len(each.words) == 2}
    return asked.together | told


def main() -> None:
    """Ask, try, show, write; exit code 1 if a pair is open, or is refused by words that do not name both options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="rows at a time")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--journal", type=Path, help="a file to which each ended row goes, and from which a later call goes on")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pairwise.md")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    groups = pairwise.factors()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        pairwise.prepare_folder(folder)
        composed.install()
        asked = ask(folder, groups, given.jobs)
        print(f"{len(asked.allowed)} pairs to train, {len(asked.together)} refused by the rules", flush=True)
        cover = Cover(asked.allowed, groups, lambda words: pairwise.refused(words, folder))
        campaign = Campaign(folder, cover, given.journal, given.jobs)
        campaign.resume()
        campaign.run(given.minutes * 60)
    given.out.write_text(document(asked, groups, campaign).replace(name, "…"), encoding="utf-8")
    left = asked.allowed - campaign.trained() - set(refusals(asked, campaign))
    unclear = [pair for pair, reason in refusals(asked, campaign).items() if not pairwise.names_both(pair, reason)]
    print(f"{len(left)} pairs open, {len(unclear)} refused by words that do not name both", *map(sorted, unclear[:20]), sep="\n")
    raise SystemExit(bool(left or unclear))


if __name__ == "__main__":
    main()
