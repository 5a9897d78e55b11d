"""State of what a user brings: found, saved with the run, restored, or refused with the reason."""

from pathlib import Path

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.user import state as owned
from drivetrain.core.user.state import OwnState
from drivetrain.core.world import World
from drivetrain.data.collation import OwnCollate, Stack
from drivetrain.data.own import OwnSource
from drivetrain.loader import Loader, Pipeline
from drivetrain.loader.auto import AutoLoader
from drivetrain.loader.device import DeviceLoader, Resident
from drivetrain.loader.threads import Threads
from drivetrain.loader.workers import Workers
from drivetrain.parallel import Parallel
from tests.support import stateful_parts
from tests.support.stateful_parts import Centred, Curriculum, Holder

WORDS = ["model=own", "model.target=drawing_sets.Net", "trust=[drawing_sets,stateful_parts]", "data=own", "data.validation=null"]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(Path(stateful_parts.__file__).parent)


def test_what_has_a_state_is_found_wherever_it_is_kept():
    holder, curriculum = Holder(), Curriculum()
    found = owned.find({"loss": holder, "again": holder, "data": curriculum, "function": torch.rand, "none": None})
    assert found == {"loss.inner.centred": holder.inner["centred"], "data": curriculum}


class Ranks(Parallel):
    """A rank among those that have these states."""

    def __init__(self, rank: int, states: list) -> None:
        self.world, self._states = World(rank, len(states)), states

    def gather_object(self, value):
        return [value if n == self.world.rank else state for n, state in enumerate(self._states)]


def test_ranks_with_one_state_save_it_once_and_others_each_its_own():
    one, other = Curriculum(), Curriculum()
    one.reads, other.reads = 5, 7
    states = [{"data": each.state_dict()} for each in (one, other)]
    assert OwnState({"data": one}, Ranks(0, states[:1] * 2)).state_dict() == {"ranks": states[:1]}
    saved = OwnState({"data": one}, Ranks(0, states)).state_dict()
    assert saved == {"ranks": states}
    OwnState({"data": one}, Ranks(1, states)).load_state_dict(saved)
    assert one.reads == 7
    for now in ([{}], [{}] * 3):
        with pytest.raises(
            UserError, match=r"each of the 2 ranks that saved this run has its own state of data, .*: resume with 2"
        ):
            OwnState({"data": one}, Ranks(0, now)).load_state_dict(saved)
    OwnState({"data": one}, Ranks(2, [{}] * 3)).load_state_dict({"ranks": states[:1]})
    assert one.reads == 5


def test_a_saved_state_is_a_copy():
    loss = Centred()
    saved = OwnState({"loss": loss}, Parallel()).state_dict()
    loss.seen += 3
    assert saved["ranks"][0]["loss"]["seen"] == 0


def test_states_are_compared_bit_for_bit():
    assert owned.same({"a": [torch.tensor([1.0, float("nan")]), "x"]}, {"a": [torch.tensor([1.0, float("nan")]), "x"]})
    for other in (torch.tensor([1.0, 2.5]), torch.tensor([1, 2]), [1.0, 2.0], None):
        assert not owned.same(torch.tensor([1.0, 2.0]), other)


def test_a_state_that_cannot_be_saved_is_refused_before_the_run(train):
    words = [*WORDS, "data.target=stateful_parts.Unsaved"]
    with pytest.raises(UserError, match=r"the state of data.train \(Unsaved\) cannot be saved .*: let its state_dict return"):
        train(*words)
    assert train(*words, "saving=none").status == "completed"


@pytest.mark.parametrize("loader", [Workers(num_workers=1), Threads(1), DeviceLoader(), DeviceLoader("sync"), Resident()])
def test_only_the_loop_itself_reads_a_set_with_a_state(loader):
    pipeline = Pipeline(OwnSource(Curriculum(), "data.target", Stack()), (), None, 0)
    assert "data (Curriculum) has a state, and only loader=sync keeps it in step" in loader.refusal(pipeline)
    assert Loader().refusal(pipeline) is None
    auto = AutoLoader(budget_s=0.01)
    auto.autotune(pipeline, 8, 2, torch.device("cpu"))
    assert auto.refusal(pipeline) is None


def test_a_function_that_makes_batches_may_have_a_state():
    together = OwnCollate(stateful_parts.Collate(), "data.collate", None)
    assert list(owned.find(OwnSource(Curriculum(), "data.target", together).own_code.keeps())) == ["data", "data.collate"]


def test_a_read_counts_once():
    """Other sets are read twice where they draw."""
    dataset = Curriculum()
    source = OwnSource(dataset, "data.target", Stack())
    source.fetch(torch.arange(5))
    source.fetch(torch.arange(5))
    assert dataset.reads == 10


def test_evaluations_leave_the_state_of_a_loss_as_it_is(train):
    words = [
        *WORDS,
        "data.target=drawing_sets.Nothing",
        "loss=own",
        "loss.target=stateful_parts.Counting",
        "epochs=4",
        "updates=null",
    ]
    often, once = (train(*words, f"evaluate_every={every}").metrics["test"]["final"] for every in (1, 4))
    assert often == once
