"""Options together, by commands of two updates and a save: every pair of two groups, or random triples.

`python -m bench.pairwise [--jobs N] [--journal FILE]` covers the pairs by rows of many options. A pair trains, or is refused with
a reason that names both; one whose row fails is tried by itself. It writes outputs/pairwise.md, the record from which
`make docs` makes a page. With `--minutes 0` nothing is trained: the record has what is refused. With
`--only WORD …` only pairs with one of these are trained, such as those of new options.

`python -m bench.pairwise --triples N [--first N]` draws options of three groups, the same ones every time. A tenth of those that
train is certified beside the same run without its exact and close techniques. It writes bench/results/triples-cpu.json.

With a journal either campaign can be broken off and gone on with. All that neither trains nor is refused is open.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.support import command, composed, pairwise
from tests.support.pairwise import Pair

from bench import harness

PAGE = harness.ROOT / "outputs" / "pairwise.md"
TRAINED, REFUSED, OPEN = "trained", "refused", "open"
# These take half a minute: they compile, or try sizes in processes of their own.
SLOW = ("compile=inductor", "compile=regional", "compile=step", "checkpointing=budget", "batch=auto", "batch=critical")
SLOW_IN = 20  # one triple in so many may have a slow option
CERTIFIED = 10  # one triple in so many
SAME, DIFFERS, SMALLER = "the same", "differs", "a BatchNorm sees smaller micro-batches"
Words = tuple[str, ...]


class Ended(NamedTuple):
    """The end of a row."""

    words: Words
    outcome: str
    said: str = ""
    certified: str = ""  # the answer; empty where nobody asked
    number: int = 0  # of the row, in the order in which they are drawn


Try = Callable[[int, Words], Ended]


def attempt(folder: Path, number: int, words: Words, certified: int = 0) -> Ended:
    """Train with these options by a command, and certify one run in so many."""
    place = Path(tempfile.mkdtemp(dir=folder))
    try:
        shutil.copy(folder / "pairwise_net.py", place)
        given = pairwise.complete(words, folder)
        done = command.train(*given, f"output_dir={place}", cwd=place)
        saved = "saving=none" in words or any(place.rglob("checkpoints/*/manifest.json"))
        if done.code != 0 or not saved:
            said = done.err.rpartition("error: ")[2].strip() or f"exit code {done.code}"
            return Ended(words, REFUSED if done.code == 2 else OPEN, said, number=number)
        answer = judged(given, place) if certified and number % certified == 0 else ""
        return Ended(words, TRAINED, certified=answer, number=number)
    except AssertionError as error:  # it hung
        return Ended(words, OPEN, str(error)[-600:], number=number)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def judged(given: Sequence[str], place: Path) -> str:
    """Certify a run beside its plain twin: the answer, or why there is none."""
    done = command.run("certify", *(word for word in given if not word.startswith("saving=")), "steps=2", cwd=place)
    if done.code == 1 and "these are of other sizes" in done.out:
        return SMALLER
    kind = {0: SAME, 1: DIFFERS}.get(done.code, "cannot be judged")
    return kind if kind == SAME else f"{kind}: {(done.out.strip() or done.err.strip())[-600:]}"


class Journal:
    """The rows that have ended, and a file that holds them for a later call."""

    def __init__(self, file: Path | None) -> None:
        self.file, lines = file, file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self.ended = [Ended(**{**row, "words": tuple(row["words"])}) for row in map(json.loads, lines)]

    def note(self, each: Ended) -> None:
        """Keep what a row came to."""
        self.ended.append(each)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(each._asdict()) + "\n")
        print(f"{len(self.ended)} {each.outcome}: {' '.join(each.words)} {each.said} {each.certified}", flush=True)


# --- pairs ---


@dataclass
class Asked:
    """The answers of the rules: options that cannot run here, pairs that cannot be together, and pairs that are to train."""

    alone: dict[str, str] = field(default_factory=dict)
    together: dict[Pair, str] = field(default_factory=dict)
    allowed: set[Pair] = field(default_factory=set)


def ask(folder: Path, groups: dict[str, list[str]], workers: int, only: Set[str] = frozenset()) -> Asked:
    """Ask the rules about every option and every pair, or those pairs alone that have one of these words; others may train."""
    words = list(itertools.chain(*groups.values()))
    with ProcessPoolExecutor(workers, get_context("spawn"), composed.install) as pool:
        said = pool.map(pairwise.refused, [[word] for word in words], itertools.repeat(folder), chunksize=16)
        alone = {word: reason for word, reason in zip(words, said, strict=True) if reason}
        able = [[word for word in options if word not in alone] for options in groups.values()]
        every = all_pairs(able)
        pairs = [pair for pair in every if not only or only & {*pair}]
        said = pool.map(pairwise.refused, pairs, itertools.repeat(folder), chunksize=64)
        together = {frozenset(pair): reason for pair, reason in zip(pairs, said, strict=True) if reason}
    return Asked(alone, together, {frozenset(pair) for pair in every} - set(together))


def all_pairs(groups: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """All pairs of words of two groups."""
    return [pair for a, b in itertools.combinations(groups, 2) for pair in itertools.product(a, b)]


class Cover:
    """Draws rows until every allowed pair has been in one: each row holds as many open pairs as fit.

    Slow options come last, so that few rows have them.
    """

    def __init__(
        self, allowed: set[Pair], groups: dict[str, list[str]], refused: Callable[[Words], object], only: Set[str] = frozenset()
    ) -> None:
        """`only` are the words whose pairs are wanted; by default all are."""
        self.allowed, self.refused = allowed, refused
        self.wanted = {pair for pair in allowed if not only or pair & only}
        self.open = set(self.wanted)
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
        self.open |= (pairs_of(row) & self.wanted) - {frozenset(cause)}

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
            del row[fewest(lambda n: bool(self.refused(tuple(row[:n]))), len(row), 2) - 1]
        return tuple(row)

    def _fits(self, word: str, row: Sequence[str]) -> bool:
        words = {word, *row}
        return all(frozenset((word, other)) in self.allowed for other in row) and not any(bad <= words for bad in self.bad)


def fewest(fails: Callable[[int], bool], size: int, good: int) -> int:
    """The smallest number above `good` that fails, where `size` does and each larger one than it."""
    while size - good > 1:
        middle = (good + size) // 2
        good, size = (good, middle) if fails(middle) else (middle, size)
    return size


def cause(row: Words, fails: Callable[[Words], bool]) -> Words:
    """The words of a failing row without which it does not fail; two at least."""
    rest, found = list(row), list[str]()
    while rest and not (len(found) > 1 and fails(tuple(found))):
        # How many of the rest it takes beside what is found.
        taken = fewest(lambda n, rest=rest: len(found) + n > 1 and fails((*found, *rest[:n])), len(rest), 0)
        found.append(rest[taken - 1])
        rest = rest[: taken - 1]
    return tuple(found)


def pairs_of(row: Words) -> set[Pair]:
    """The pairs in a row."""
    return {frozenset(pair) for pair in itertools.combinations(row, 2)}


@dataclass
class Campaign:
    """The rows that ended, and what is left to try."""

    cover: Cover
    journal: Journal
    attempt: Try

    def run(self, jobs: int, seconds: float) -> None:
        """Try rows until all pairs have trained or failed by themselves, or the time is up. What has ended is not tried again."""
        self.cover.open -= self.trained()
        for each in self.journal.ended:
            if each.outcome != TRAINED and len(each.words) == 2:
                self.cover.bad.append(set(each.words))
                self.cover.open.discard(frozenset(each.words))
        for each in harness.at_once(enumerate(self.cover, len(self.journal.ended)), self.attempt, jobs, seconds):
            self.journal.note(each)
            if each.outcome != TRAINED:
                self.cover.failed(each.words, cause(each.words, self._fails))

    def _fails(self, words: Words) -> bool:
        self.journal.note(self.attempt(len(self.journal.ended), words))
        return self.journal.ended[-1].outcome != TRAINED

    def trained(self) -> set[Pair]:
        """The pairs that have trained together in some row."""
        rows = (each.words for each in self.journal.ended if each.outcome == TRAINED)
        return {pair for words in rows for pair in pairs_of(words)} & self.cover.allowed


def document(asked: Asked, groups: dict[str, list[str]], campaign: Campaign) -> str:
    """outputs/pairwise.md."""
    pairs = all_pairs(list(groups.values()))
    trained, refused = campaign.trained(), refusals(asked, campaign)
    alone = sum(any(word in asked.alone for word in pair) for pair in pairs)
    left = len(pairs) - len(trained) - len(refused) - alone
    counted = f"{len(refused)} refused with a reason that names both, {alone} with an option that this machine cannot run"
    if campaign.journal.ended:
        made = "python -m bench.pairwise"
        counted = (
            f"{len(trained)} trained together, two updates and a save; {counted}, {left} not tried yet, or open, as listed below"
        )
        counted += f".\n{len(campaign.journal.ended)} runs covered them"
    else:
        made, counted = "python -m bench.pairwise --minutes 0", f"{counted}.\nThe other {left} were not trained for this page"
    together = [(" · ".join(sorted(pair)), " ".join(refused[pair].split())) for pair in sorted(refused, key=sorted)]
    open_ = [f"- `{' '.join(e.words)}`: {' '.join(e.said.split())}\n" for e in campaign.journal.ended if e.outcome == OPEN]
    parts = {
        "Refused together": harness.markdown(("pair", "reason"), together),
        "Not on this machine": harness.markdown(("option", "reason"), [(w, " ".join(r.split())) for w, r in asked.alone.items()]),
        "Tried": harness.markdown(("group", "options"), [(group, " ".join(words)) for group, words in groups.items()]),
        **({"Open": "".join(open_)} if open_ else {}),
    }
    text = f"{len(pairs)} pairs of options: {counted}.\n\nWritten by `{made}` on a CPU ({harness.machine()['cpu']}).\n"
    under = [f"\n## {title}\n\n{part}" for title, part in parts.items()]
    return "".join(["# Which options go together\n\n", text, *under])


def refusals(asked: Asked, campaign: Campaign) -> dict[Pair, str]:
    """The refused pairs with their reasons: by the rules, or by themselves when they were to train."""
    told = {
        frozenset(each.words): each.said for each in campaign.journal.ended if each.outcome == REFUSED and len(each.words) == 2
    }
    return asked.together | told


def pairs(given: Any, folder: Path, journal: Journal) -> bool:
    """Ask, try, write the record. Return whether, after training, a pair is open, or refused by words that do not name both."""
    groups = pairwise.factors()
    composed.install()
    asked = ask(folder, groups, given.jobs, set(given.only))
    cover = Cover(asked.allowed, groups, lambda words: pairwise.refused(words, folder), set(given.only))
    print(f"{len(cover.wanted)} pairs to train, {len(asked.together)} refused by the rules", flush=True)
    campaign = Campaign(cover, journal, partial(attempt, folder))
    campaign.run(given.jobs, given.minutes * 60)
    given.out.write_text(document(asked, groups, campaign).replace(str(folder), "…"), encoding="utf-8")
    left = cover.wanted - campaign.trained() - set(refusals(asked, campaign))
    unclear = [pair for pair, reason in refusals(asked, campaign).items() if not pairwise.names_both(pair, reason)]
    print(f"{len(left)} pairs open, {len(unclear)} refused by words that do not name both", *map(sorted, unclear[:20]), sep="\n")
    return given.minutes > 0 and bool(left or unclear)


# --- triples ---


def drawn(able: Callable[[str], bool], slow: bool = True) -> Iterator[Words]:
    """Triples without an end, always the same ones, of options that this machine can run."""
    dice, groups = random.Random(27), pairwise.factors()
    for number in itertools.count():
        allowed, words = slow and number % SLOW_IN == 0, Words()
        while not words or not all(able(word) and (allowed or word not in SLOW) for word in words):
            words = tuple(dice.choice(groups[group]) for group in dice.sample(sorted(groups), 3))
        yield words


def summary(ended: Sequence[Ended]) -> dict[str, Any]:
    """Counts, and every open triple, also one that is not the same mathematics as it claims."""
    counts = Counter(each.outcome for each in ended)
    return {
        "triples": len(ended), **{outcome: counts[outcome] for outcome in (TRAINED, REFUSED, OPEN)},
        "certified": Counter(each.certified.partition(":")[0] for each in ended if each.certified),
        "open_triples": [each._asdict() for each in ended if each.outcome == OPEN or each.certified.startswith(DIFFERS)],
    }  # fmt: skip


def triples(given: Any, folder: Path, journal: Journal) -> bool:
    """Try, show, write. Return whether a triple is open."""
    done, able = {each.number for each in journal.ended}, cache(lambda word: pairwise.refused([word], folder) is None)
    numbers = range(given.first, given.first + given.triples)
    rows = ((number, words) for number, words in enumerate(drawn(able)) if number in numbers and number not in done)
    rows = itertools.islice(rows, len(set(numbers) - done))
    for each in harness.at_once(rows, partial(attempt, folder, certified=CERTIFIED), given.jobs, given.minutes * 60):
        journal.note(each)
    found = summary(journal.ended)
    harness.table("triples of options", ["", ""], [[name, str(found[name])] for name in found if name != "open_triples"])
    harness.write(harness.RESULTS / "triples-cpu.json" if given.out == PAGE else given.out, found)
    return bool(found["open_triples"])


def main() -> None:
    """Run a campaign; exit code 1 where something is open."""
    given = harness.parse(__doc__, PAGE, jobs=2, minutes=600.0, journal=Path, triples=0, first=0, only=[])
    harness.fork_commands()
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_STATE_HOME"] = f"{name}/state"
        pairwise.prepare_folder(Path(name))
        raise SystemExit((triples if given.triples else pairs)(given, Path(name), Journal(given.journal)))


if __name__ == "__main__":
    main()
