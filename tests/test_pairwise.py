"""Any two options go together, or are refused with a reason that names both: a sample. `python -m bench.pairwise` tries all."""

import itertools
import random
import re
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What options want from outside."""
    pairwise.prepare_folder(made := tmp_path_factory.mktemp("pairwise"))
    return made


@pytest.mark.parametrize("pair", sampled(), ids=" ".join)
def test_a_pair_trains_or_is_refused_for_both(pair: tuple[str, str], folder: Path) -> None:
    came = pairwise.try_one(pair, str(folder))
    assert came.status in ("trained", "refused"), came
    if came.status == "refused":
        by_itself = [word for word in pair if pairwise.refused([word], folder)]
        assert by_itself or pairwise.names_both(frozenset(pair), came.reason), came


OF_A_KIND = list(itertools.product(*(pairwise.factors()[group] for group in ("loss", "data", "model"))))
OPEN = [words for words in OF_A_KIND if "data=stream" in words]  # only its samples tell what they are


@pytest.mark.parametrize("given", [OPEN[::5], pytest.param(OF_A_KIND, marks=pytest.mark.slow)], ids=len)
def test_a_loss_trains_or_is_refused_with_any_data_and_model(given: list[tuple[str, ...]], folder: Path) -> None:
    came = (pairwise.try_one(words, str(folder)) for words in given)
    assert not [each for each in came if each.status == "broken"]


def test_every_option_is_in_the_cover() -> None:
    from drivetrain.config.catalog import options

    words = set(itertools.chain(*pairwise.factors().values()))
    alone = {group for group, names in options().items() if len(names) == 1}
    assert len(words) >= sum(len(names) for group, names in options().items() if group not in alone)


ALONE = list(itertools.chain(*pairwise.factors().values()))
HERE_NEVER = "is not installed|needs a CUDA device|finds no CUDA device"  # reasons of the machine, which no setting mends


@pytest.mark.parametrize("words", [random.Random(0).sample(ALONE, 8), pytest.param(ALONE, marks=pytest.mark.slow)], ids=len)
def test_no_option_is_refused_by_itself(words: list[str], folder: Path) -> None:
    """With the settings of the table. One that is would be refused in all of its pairs, and tried in none."""
    reasons = {word: pairwise.refused([word], folder) for word in words}
    assert not {word: why for word, why in reasons.items() if why is not None and not re.search(HERE_NEVER, why)}


@pytest.mark.parametrize(
    "words",
    [
        "loss=distill data=digits",
        "loss=distill data=wine",
        "optimizer=schedulefree ema=ema",
        "loss=gaussian_nll model=transformers",  # two outputs for a number that has a name
        "loss=siglip data=stream task=contrastive data.targets=class augment=[flip_crop]",
        "checkpointing.memory_gb=4 model=transformers",  # its weights are drawn again until they fit, which reads them
        "checkpointing.memory_gb=4 surgery=[fused_norm]",  # an edit that compares results
        "debug=gradcheck data=words",  # an embedding with a row for padding, whose gradient is left out
    ],
)
def test_an_option_with_needs_trains(words: str, folder: Path) -> None:
    """The settings that it wants are in the table, so that it is not one of those that this machine cannot run."""
    came = pairwise.try_one(tuple(words.split()), str(folder))
    assert came.status == "trained", came


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("loss=siglip data=stream model=transformers", "the loss wants 2 views of each sample"),
        ("loss=tversky data=stream", "loss=tversky does not fit the data: the targets of data=stream"),
        (
            "loss=gaussian_nll model=unet data=own",
            "loss=gaussian_nll cannot be computed from the output of model=unet, a tensor (n, 2, 32, 32), and the targets of "
            "data=own, a tensor (n,)",
        ),
        (
            "loss=gaussian_nll data=stream",
            "the targets of data=stream have shape (n,) and fit outputs of size 2, but the model gives 4",
        ),
        (
            "checkpointing=blocks loss=tversky",
            "no repeated block in the model: set checkpointing.block to one of Sequential",
        ),
        ("checkpointing=blocks model=own model.target=pairwise_net.Teacher", "no repeated block in the model: leave checkpoint"),
        ("loss=masked_token data=stream model=mlp", "hides tokens of texts (n, length), and the targets have shape (n,)"),
        ("loss=token data=own model=transformers", "reads tokens (n, length), and the inputs of data=own have shape (n, 3, 32"),
        ("model=transformers model.head=image data=stdlib", "with head=image reads images, and the inputs of data=stdlib have"),
        (
            "loss=own task=contrastive model=transformers",
            "reads images, and the inputs of data=digits have shape (n, 2",
        ),
        ("loss=own task=contrastive model=timm", "model=timm wants images, but the data gives [2, 1, 8, 8]"),
        ("loss=asymmetric data=own model=unet", "loss=asymmetric compares each output with one target"),
        ("adapter.lr_ratio=16 optimizer=lbfgs", "optimizer.lr_multipliers={} adapter.lr_ratio=1"),
        ("surgery=[channels_last] optimizer=lbfgs", "optimizer=lbfgs and surgery=[channels_last] exclude each other"),
    ],
)
def test_what_cannot_be_says_so(words: str, says: str, folder: Path) -> None:
    came = pairwise.try_one(tuple(words.split()), str(folder))
    assert came.status == "refused", came
    assert says in came.reason


def test_a_broken_combination_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: a run that ends without an update, and one that raises."""
    monkeypatch.setattr("drivetrain.optimizer.algorithms.flat_optimizer.Lion.update", lambda *a: 1 / 0)
    assert pairwise.try_one(("optimizer=lion", "clip=norm"), str(folder)).status == "broken"
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
    of_new = list(campaign.Cover(pairs, groups, lambda row: False, {"a=1", "d=2"}))
    assert set().union(*map(campaign.pairs_of, of_new)) >= {pair for pair in pairs if pair & {"a=1", "d=2"}}
    assert len(of_new) < len(rows)
    assert all({"a=1", "d=2"} & set(row) for row in of_new)


@pytest.mark.parametrize("culprits", [("b", "d"), ("a", "e", "c"), ("a", "b")])
def test_the_words_that_make_a_row_fail_are_found(culprits: tuple[str, ...]) -> None:
    found = campaign.cause(("a", "b", "c", "d", "e"), lambda words: set(culprits) <= set(words))
    assert sorted(found) == sorted(culprits)


def test_the_campaign_covers_two_groups(tmp_path: Path) -> None:
    """Some pairs fail when they run, and the journal keeps what has been tried."""
    groups = {
        "optimizer": ["optimizer=lion", "optimizer=sgd"],
        "data": ["data=digits", "data=wine"],
        "loss": ["loss=cross_entropy"],
    }
    pairs = {frozenset(pair) for pair in campaign.all_pairs(list(groups.values()))}

    def attempt(number: int, words: tuple[str, ...]) -> campaign.Ended:
        return campaign.Ended(words, campaign.OPEN if "optimizer=lion" in words else campaign.TRAINED, number=number)

    def run() -> campaign.Campaign:
        cover = campaign.Cover(pairs, groups, lambda words: None)
        found = campaign.Campaign(cover, campaign.Journal(tmp_path / "journal"), attempt)
        found.run(2, 100)
        return found

    done = run()
    assert done.trained() == {pair for pair in pairs if "optimizer=lion" not in pair}
    assert "3 not tried yet" in campaign.document(campaign.Asked({}, {}, pairs), groups, done)
    assert len(run().journal.ended) == len(done.journal.ended)


def test_what_becomes_of_a_row(tmp_path: Path) -> None:
    """One trains and is certified, one is refused with its reason, one fails and is open."""
    pairwise.prepare_folder(tmp_path)
    net = tmp_path / "pairwise_net.py"
    net.write_text(net.read_text().replace("def my_loss(output, y):", "def my_loss(output, y):\n    1 / 0"))
    given = [
        ("model=mlp", "clip=value", "batch=accumulate"),
        ("model=mlp", "loss=next_token", "data=digits"),
        ("model=mlp", "loss=own", "data=digits"),
    ]
    ended = [campaign.attempt(tmp_path, number, words, certified=3) for number, words in enumerate(given)]
    assert [each.outcome for each in ended] == ["trained", "refused", "open"], ended
    assert ended[0].certified == campaign.SAME
    assert "data=digits" in ended[1].said
    assert "division by zero" in ended[2].said
    found = campaign.summary([*ended, ended[0]._replace(certified="differs: by far")])
    assert (found["triples"], found["trained"], found["refused"], found["open"]) == (4, 2, 1, 1)
    assert [tuple(each["words"]) for each in found["open_triples"]] == [given[2], given[0]]


def test_triples_are_the_same_ones_every_time() -> None:
    def drawn() -> list[tuple[str, ...]]:
        return list(itertools.islice(campaign.drawn(lambda word: word != "parallel=dp"), 1000))

    found = drawn()
    assert found == drawn()
    assert all(len({word.partition("=")[0] for word in words}) == 3 for words in found)
    compiled = [n for n, words in enumerate(found) if set(words) & set(campaign.SLOW)]
    assert compiled
    assert all(n % campaign.SLOW_IN == 0 for n in compiled)


@pytest.mark.slow
def test_twenty_triples(tmp_path: Path) -> None:
    pairwise.prepare_folder(tmp_path)
    drawn = campaign.drawn(lambda word: pairwise.refused([word], tmp_path) is None, slow=False)
    ended = [campaign.attempt(tmp_path, n, words, certified=10) for n, words in enumerate(itertools.islice(drawn, 20))]
    assert campaign.summary(ended)["open_triples"] == []
