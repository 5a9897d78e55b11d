"""Optimizer states shared over ranks (ZeRO-1): the same bits as under ddp, and a share of the states on each rank."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from drivetrain.core.world import World
from drivetrain.launch import worker
from drivetrain.launch.job import prepare
from drivetrain.measure.rehearse import flat
from drivetrain.saving import checkpoint_io
from tests.support.ranks import saved, train_to
from tests.support.refusals import problems_of

COMMON = ["runtime.device=cpu", "runtime.threads=1", "saving=none", "updates=4", "model=mlp", "model.hidden=[16,64,48]"]
DDP = ["parallel=ddp", "parallel.nproc=2"]
ALL_AT_ONCE = [
    "optimizer=adamw", "optimizer.lr_multipliers={layers.0: 0.1}", "clip=norm", "clip.max_norm=0.1", "ema=ema",
    "precision=amp", "precision.init_scale=1024.0", "batch=accumulate", "batch.accumulation_steps=2", "model.dropout=0.1",
]  # fmt: skip
SAME_BITS = {
    "all at once": ALL_AT_ONCE,
    "muon": ["optimizer=muon", "optimizer.normalize=neurons", "clip=agc", "clip.clip_factor=0.001"],
    "momentum that is there from the start": ["optimizer=sgd", "clip=value", "clip.clip_value=0.01"],
    "state that is there from the start": ["optimizer=adagrad", "clip=spike", "clip.window=4"],
    "layers of a batch": ["optimizer=lion"],
    "norms of layers": ["optimizer=lars"],
    "rows and columns": ["optimizer=adafactor", "optimizer.eps1=1e-6"],
    "weights that begin to train": [
        "model.freeze=[layers.0]", "model.unfreeze={layers.0: 2}", "parallel.find_unused_parameters=true",
    ],
    "decay of later layers": ["optimizer=adamw", "optimizer.weight_decay=0.1", "optimizer.final_weight_decay=0.5"],
}  # fmt: skip
SHORT = ("all at once", "muon")
SHARED = "parallel.shard_optimizer=true"


def state_bytes(trainer: Any) -> int:
    tensors = [t for t in tree_leaves(trainer.optimizer.state_dict()["state"]) if isinstance(t, torch.Tensor)]
    return sum(t.nbytes for t in tensors if not t.is_meta and t.ndim)


def without_log(full: Any) -> dict[str, Any]:
    return {key: value for key, value in flat(list(full)).items() if not key.startswith("1.log")}


@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.slow) for n in SAME_BITS])
def test_two_ranks_share_states_and_train_to_the_same_bits_also_after_a_resume(ranks, make, case):
    words = [*COMMON, *DDP, *SAME_BITS[case]]

    def work(world: World) -> Any:
        plain = make(*words, world=world)
        expected = train_to(2, plain) and train_to(4, plain)
        trainer = make(*words, SHARED, world=world)
        middle = trainer.parallel.broadcast_object(train_to(2, trainer))
        whole = train_to(4, trainer)
        again = make(*words, SHARED, world=world)
        again.restore(*middle)
        full = expected, whole, train_to(4, again)
        return [without_log(each) for each in full] if world.rank == 0 else None, state_bytes(trainer), state_bytes(plain)

    ((expected, whole, resumed), first, all_states), (_, second, _) = ranks(work)
    assert len(expected) > 10
    assert [key for key, value in expected.items() if whole.get(key) != value] == []
    assert resumed == whole
    assert first + second == all_states
    assert max(first, second) < 0.7 * all_states


def test_a_norm_of_all_gradients_differs_by_the_order_of_its_sum(ranks, make, float64):
    """NVLAMB's own is the root of a sum over its vectors, that of the ranks over weights."""
    words = [*COMMON, *DDP, "optimizer=nvlamb", "optimizer.max_grad_norm=0.05"]

    def work(world: World) -> Any:
        trainers = (make(*words, *more, world=world) for more in ([], [SHARED]))
        return [{name: w.tolist() for name, w in train_to(4, trainer)[0].items()} for trainer in trainers]

    (plain, shared), _ = ranks(work)
    for name, weight in plain.items():
        torch.testing.assert_close(torch.tensor(shared[name]), torch.tensor(weight), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("sharded", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_what_two_ranks_saved_goes_on_on_one_and_on_four(ranks, make, tmp_path, sharded):
    """One process has the states of all; four ranks that share them go on to the bits of four that do not."""
    (tmp_path / "run").mkdir()
    words = [*COMMON, "optimizer=muon", "ema=ema"]

    def saves(world: World) -> Any:
        trainer = make(*words, *DDP, SHARED, "saving=last", f"saving.sharded={sharded}", world=world)
        return without_log(train_to(2, trainer))

    whole, _ = ranks(saves)
    at = tmp_path / "run/checkpoints/2"
    one = make(*words)
    one.restore(*checkpoint_io.load(at))
    alone = without_log(saved(one))
    kept = {key: value for key, value in whole.items() if key.startswith(("0.", "1.optimizer.state", "1.ema"))}
    assert {key: alone[key] for key in kept} == kept
    assert {key.split(".")[1] for key in kept} >= {"optimizer", "ema"}
    train_to(3, one)

    def goes_on(world: World) -> Any:
        found = []
        for more in ([], [SHARED]):
            trainer = make(*words, "parallel=ddp", "parallel.nproc=4", *more, world=world)
            trainer.restore(*worker.load(at, trainer.parallel))
            found.append(without_log(train_to(4, trainer)))
        return found

    (plain, shared), *_ = ranks(goes_on, 4)
    assert shared == plain
    assert len(plain) > 10


def test_phases_share_their_own_weights(ranks, make):
    words = [*COMMON, *DDP, "phases={body: {parameters: ['layers.*']}, head: {parameters: ['head.*'], every: 2}}"]

    def work(world: World) -> Any:
        return [without_log(train_to(4, make(*words, *more, world=world))) for more in ([], [SHARED])]

    (plain, shared), _ = ranks(work)
    assert shared == plain
    assert len(plain) > 10


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["optimizer=sam"], "updates each weight separately"),
        (["optimizer=schedulefree", "scheduler=constant"], "wants all averages"),
        (["optimizer=timm", "optimizer.name=lamb"], "the norm of all gradients"),
        (["precision=bf16_pure"], "it keeps copies of all weights"),
        (["compile=step"], "its graph is the same on all ranks"),
        (["precision=amp", "parallel.find_unused_parameters=true"], "must report an overflow"),
    ],
)
def test_what_cannot_share_its_states_is_refused(problems, words, why):
    found = problems("parallel=ddp", "parallel.nproc=2", "runtime.device=cpu", SHARED, *words)
    assert any(why in problem and "set " in problem for problem in found)


def test_one_rank_shares_nothing_and_says_so():
    run = prepare(["parallel=ddp", "parallel.nproc=1", "runtime.device=cpu", SHARED]).run
    assert "parallel.shard_optimizer=true has no effect: there is one rank" in [*run.parallel.advise(run)]


def test_more_ranks_than_weights_are_refused(ranks, make):
    def work(world: World) -> str:
        return "\n".join(problems_of(make, *COMMON, *DDP, SHARED, "model.freeze=[layers.*,head.weight]", world=world))

    assert all("2 ranks share 1 trained weights, and each needs one: set" in said for said in ranks(work))
