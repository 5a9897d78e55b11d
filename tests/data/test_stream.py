"""data=stream: each rank and worker has a part, and a run that was stopped goes on at the next sample."""

import copy
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.core.errors import DataError, UserError
from drivetrain.core.world import World
from drivetrain.data.stream import OwnStream
from drivetrain.inference.evaluation import evaluate
from tests.support import streams
from tests.support.same_end import resumed

CPU = torch.device("cpu")
KINDS = {"numbers": {}, "hugging_face": {"classes": 4}, "loader": {}}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(streams.__file__).parent)


def source(kind: str = "numbers", rank: int = 0, ranks: int = 1, **settings):
    option = OwnStream(target=f"streams.{kind}", **{**KINDS.get(kind, {}), **settings})
    option._samples = 10_000
    return option.load(CPU).train.taken(World(rank, ranks), 5, ExitStack())


def take(taken, *sizes: int) -> list[torch.Tensor]:
    """The inputs of micro-batches of these sizes."""
    at = taken.reads._last[1]
    return [taken.fetch(torch.arange(at + 1 + n * 100, at + 1 + n * 100 + size), 1, (0, 0))[0] for n, size in enumerate(sizes)]


def numbers(x: torch.Tensor) -> list[int]:
    return (x[:, 0] * 100).round().int().tolist()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_goes_on_after_each_micro_batch_where_it_was(kind, workers):
    """Over its end too. What the samples draw is the same, whoever has drawn in between."""
    sizes = [8, 20, 3, 40, 31, 32, 30]
    whole = take(source(kind, workers=workers), *sizes)
    for done in (3,) if workers else (1, 3, 5):
        first = source(kind, workers=workers)
        take(first, *sizes[:done])
        state = copy.deepcopy(first.reads.state_dict())
        torch.rand(5)
        again = source(kind, workers=workers)
        again.reads.load_state_dict(state)
        for x, expected in zip(take(again, *sizes[done:]), whole[done:], strict=True):
            if kind == "loader":  # its draws are its own
                x, expected = x[:, :1], expected[:, :1]
            assert torch.equal(x, expected)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["numbers", "hugging_face"])
def test_ranks_and_workers_have_each_sample_once(kind, workers):
    parts = [numbers(take(source(kind, rank, 2, workers=workers), 50)[0]) for rank in range(2)]
    assert sorted(parts[0] + parts[1]) == list(range(100))
    assert set(parts[0]).isdisjoint(parts[1])
    if kind == "numbers" and not workers:
        assert parts[0] == list(range(0, 100, 2))


def test_draws_differ_by_sample_rank_and_pass_and_move_no_stream():
    before = torch.get_rng_state()
    found = torch.cat([*take(source(), 100, 100), *take(source(rank=1, ranks=2), 50)])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(found[:, 1].unique()) == len(found[:, 2].unique()) == 250


def test_looks_take_nothing():
    taken = source()
    seen = [taken.reads.look([0, 1])[0], taken.reads.look([3, 5, 2, 103])[0]]
    assert [numbers(x) for x in seen] == [[0, 1], [3, 5, 2, 0]]
    assert numbers(take(taken, 3)[0]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"kind": "stateless"}, "without state_dict and load_state_dict"),
        ({"kind": "asking"}, "whose state_dict wants what its loader knows .*'num_samples'.*: let the target return that loader"),
        ({"kind": "hugging_face", "kwargs": {"shuffled": True}}, r"shuffles in a buffer .*data\.approximate=true"),
        ({"kind": "numbers", "train": {"split": "test"}, "test": {}}, "is no stream"),
    ],
)
def test_what_cannot_go_on_is_refused(words, says):
    with pytest.raises(UserError, match=says):
        source(**words)


def test_what_goes_on_approximately_says_so(caplog):
    source("hugging_face", kwargs={"shuffled": True}, approximate=True)
    assert "goes on approximately" in caplog.text


def test_other_ranks_and_workers_and_second_reads_are_refused():
    state = source().reads.state_dict()
    with pytest.raises(UserError, match=r"read by 1 ranks, and now there are 2: .*parallel\.nproc=1"):
        source(ranks=2).reads.load_state_dict(state)
    with pytest.raises(UserError, match=r"read by 1 workers|read by 0 workers, and now there are 1: .*data\.workers=0"):
        source(workers=1).reads.load_state_dict(state)
    taken = source()
    taken.fetch(torch.arange(8), 1, (0, 1))
    with pytest.raises(UserError, match="cannot be read a second time"):
        taken.fetch(torch.arange(8), 1, (0, 1))


def test_a_part_without_samples_is_an_error():
    with pytest.raises(DataError, match="gives no samples to rank 1 of 2"):
        take(source(rank=1, ranks=2, kwargs={"count": 1}), 4)


WORDS = [
    "data=stream", "data.target=streams.numbers", "data.updates=3", "model=own", "model.target=drawing_sets.Net",
    "trust=[drawing_sets,streams]", "runtime.device=cpu", "runtime.threads=1", "epochs=4", "updates=null",
]  # fmt: skip


@pytest.mark.parametrize("words", [[], ["data.workers=2"], ["parallel=ddp", "parallel.nproc=2"]])
def test_a_run_that_stopped_ends_with_the_weights_of_one_that_did_not(tiny, words):
    whole, _ = resumed(tiny(*WORDS, *words), 5, 12)
    assert whole.epochs == 4


def test_a_run_with_readers_or_other_ranks_is_told_what_to_set(train):
    with pytest.raises(UserError, match="has a state, and only loader=sync keeps it in step"):
        train(*WORDS, "loader=workers")
    part = train(*WORDS, "updates=5")
    assert evaluate(part.run_dir, ["trust=[drawing_sets,streams]"]).metrics == part.tested("final")
    words = ["updates=12", "parallel=ddp", "parallel.nproc=2", "resume_changed=true"]
    again = drivetrain.train([f"resume={part.run_dir}", *words])
    assert "was read by 1 ranks, and now there are 2" in str(again.error)


def test_a_state_that_cannot_be_saved_is_told_before_the_first_update():
    with pytest.raises(UserError, match=r"the state of data\.target=streams\.unsavable .* cannot be saved"):
        take(source("unsavable"), 4)
