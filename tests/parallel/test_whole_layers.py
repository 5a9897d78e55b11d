"""Options that need whole layers equal one process where each rank holds a part of them, and go on exactly from a checkpoint."""

import importlib.util
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.utils._pytree import tree_leaves

from drivetrain.core.machine import files
from drivetrain.core.world import World
from drivetrain.launch import worker
from drivetrain.measure.rehearse import flat
from drivetrain.parallel.sharded import WholeWeights, parts_of
from drivetrain.saving import checkpoint_io
from tests.support.ranks import saved, train_to

VIT = [
    "model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,8,8]",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 12, num_heads: 2}",
]  # fmt: skip
MLP = ["model=mlp", "model.hidden=[15,1,15]", "data.classes=3"]  # nothing divides into two equal parts
STRATEGIES = {
    "fsdp": [*MLP, "parallel=fsdp"],
    "tensor": [*VIT, "parallel=tensor"],
    "pipeline": [*MLP, "parallel=pipeline"],
}
COMMON = ["runtime.device=cpu", "runtime.threads=1", "saving=none", "updates=3"]
NORMS = {
    "lars": ["optimizer=lars", "optimizer.momentum=0.5"],
    "lamb": ["optimizer=lamb"],
    "nvlamb": ["optimizer=nvlamb", "optimizer.max_grad_norm=0.05"],
    "novograd": ["optimizer=novograd"],
    "agc": ["optimizer=adamw", "clip=agc", "clip.clip_factor=0.001"],
}
ELEMENTS = {"schedulefree": ["optimizer=schedulefree", "optimizer.lr=0.05"]}  # has other weights to save than to train

WHOLE = {
    "muon": ["optimizer=muon", "clip=norm", "clip.max_norm=0.1"],
    # A key has no gradient, whose rounding Adafactor would scale up.
    "adafactor": ["optimizer=adafactor", "optimizer.eps1=1e-6"],
    "timm": ["optimizer=timm", "optimizer.name=adan", "clip=agc", "clip.clip_factor=0.001"],
    "shampoo": [
        "optimizer=shampoo",
        "optimizer.start=2",
        "optimizer.precondition_frequency=1",
        "optimizer.max_precondition_dim=64",
    ],
}
# An eigenbasis is determined only where a gradient has full rank: neither the head's nor a token's has.
SOAP = ["optimizer=soap", "optimizer.eps=1e-3", "optimizer.precondition_frequency=2", "updates=6"]
SOAPS = {
    "fsdp": [*SOAP, "model.hidden=[5,5,5]", "optimizer.max_precondition_dim=5", "model.freeze=[head]"],
    "tensor": [*SOAP, "optimizer.max_precondition_dim=12", "model.freeze=[head,cls_token,pos_embed]"],
}


def ended(trainer: Any) -> dict[str, Any]:
    """Weights and optimizer state by name at a run's end, on rank 0."""
    trainer.fit()
    weights, state = saved(trainer)
    return {**weights, **by_name(state["optimizer"])} if trainer.parallel.world.rank == 0 else {}


def ended_twice(make: Any, words: list[str], world: World) -> list[dict[str, Any]]:
    """The end of a run, and that of one which goes on from what it was after two updates."""
    trainer = make(*words, world=world)
    updates = trainer.max_updates
    full = trainer.parallel.broadcast_object(train_to(2, trainer))
    trainer.max_updates = updates
    whole, again = ended(trainer), make(*words, world=world)
    again.restore(*full)
    return [{key: value.tolist() for key, value in of.items()} for of in (whole, ended(again))]


def by_name(optimizer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, state in optimizer["state"].items():
        for key, value in state.items():
            parts = {f"{key} {n}": part for n, part in enumerate(value)} if isinstance(value, list) else {key: value}
            found |= {f"{name} {part}": torch.as_tensor(tensor) for part, tensor in parts.items()}
    return found


def told(of: str, what: str) -> str:
    return f"{of}: {what}"


def equal_on_two_ranks(ranks: Any, make: Any, strategy: str, cases: dict[str, list[str]], to: float) -> None:
    split = (
        ["parallel.nproc=2"] if strategy != "pipeline" else ["parallel.nproc=2", "batch=accumulate", "batch.accumulation_steps=2"]
    )
    on_ranks = {name: [*COMMON, *STRATEGIES[strategy], *split, *words] for name, words in cases.items()}

    found, _ = ranks(lambda world: {name: ended_twice(make, words, world) for name, words in on_ranks.items()})
    for name, words in cases.items():
        alone = [w for w in STRATEGIES[strategy] if not w.startswith("parallel")]
        one, (whole, resumed) = ended(make(*COMMON, *alone, *words)), found[name]
        assert whole.keys() == one.keys()
        for key, value in one.items():
            torch.testing.assert_close(
                torch.tensor(whole[key], dtype=torch.float64),
                value.double(),
                rtol=to,
                atol=1 if value.dtype == torch.uint8 else to,  # a code of 256 may be the next one
                msg=partial(told, f"{name}: {key}"),
            )
        assert resumed == whole


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_norms_of_layers_and_elements(ranks, make, float64, strategy):
    equal_on_two_ranks(ranks, make, strategy, NORMS | ELEMENTS, 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_whole_weights_of_one_owner(ranks, make, float64, strategy):
    equal_on_two_ranks(ranks, make, strategy, WHOLE, 1e-10)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.slow
def test_soap(ranks, make, float64, monkeypatch, strategy):
    """With its bases in float64 too; what the library rounds to float32 there is magnified where two eigenvalues are near."""
    soap = importlib.import_module("pytorch_optimizer.optimizer.soap")
    monkeypatch.setattr(soap, "torch", SimpleNamespace(**vars(torch) | {"float32": torch.float64}))
    equal_on_two_ranks(ranks, make, strategy, {"soap": SOAPS.get(strategy, SOAPS["fsdp"])}, 1e-7)


WHOLE_STATES = {"muon": ["optimizer=muon", "model.hidden=[64,64]"], "soap": ["optimizer=soap", "model.hidden=[64,64]"]}


@pytest.mark.parametrize("name", WHOLE_STATES)
def test_states_of_whole_weights_are_sent_one_by_one(ranks, make, tmp_path, name):
    """As many bytes as the state of the weights that the other rank owns, by no pickle. The run goes on from them exactly."""
    words = [
        "runtime.device=cpu",
        "runtime.threads=1",
        "saving=last",
        "parallel=fsdp",
        "parallel.nproc=2",
        "model=mlp",
        "updates=3",
    ]
    (tmp_path / "run").mkdir()

    def work(world: World) -> Any:
        trainer = make(*words, *WHOLE_STATES[name], world=world)
        train_to(2, trainer)
        objects, tensors, gather, send = [], [], dist.gather_object, dist.send
        dist.gather_object = lambda value, *args, **settings: objects.append(value) or gather(value, *args, **settings)
        dist.send = lambda tensor, *args, **settings: tensors.append(tensor.nbytes) or send(tensor, *args, **settings)
        saved(trainer)
        dist.gather_object, dist.send = gather, send
        own = [t.nbytes for t in tree_leaves(trainer.optimizer.state_dict()["state"]) if isinstance(t, torch.Tensor)]
        unbroken = train_to(3, trainer)
        again = make(*words, *WHOLE_STATES[name], world=world)
        again.restore(*worker.load(tmp_path / "run/checkpoints/2", again.parallel))
        resumed = train_to(3, again)
        counted = max(len(pickle.dumps(value)) for value in objects), sum(tensors), max(own), sum(own)
        return [flat(list(full)) for full in (unbroken, resumed)] if world.rank == 0 else counted

    (unbroken, resumed), (pickled, sent, largest, own) = ranks(work)
    assert resumed == unbroken
    assert pickled < largest
    assert own <= sent < own + 2 * largest  # the states of random streams too


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="needs torchao")
def test_state_in_eight_bits(ranks, make):
    """A gradient that was summed otherwise may round to the next of the 256 values. Resuming is exact."""
    equal_on_two_ranks(ranks, make, "fsdp", {"adamw8bit": ["optimizer=adamw8bit", "model.hidden=[64,65,64]"]}, 2e-3)


def test_norms_of_layers_and_whole_weights(ranks, make, float64):
    """The short form: norms that are summed over the ranks, a norm of all gradients, rows of vectors, owners of weights.

    And an optimizer that saves other weights than it trains, and one whose state has other shapes than its weights.
    """
    cases = {"nvlamb": NORMS["nvlamb"], "muon": [*WHOLE["muon"][:1], "clip=agc"], "shampoo": WHOLE["shampoo"], **ELEMENTS}
    equal_on_two_ranks(ranks, make, "fsdp", cases, 1e-10)


def test_names_of_weights_on_another_rank(ranks, make, float64):
    """A stage of a pipeline has some of the blocks alone, and settings name all of them."""
    words = ["optimizer=adamw", "optimizer.no_weight_decay=[layers.2]", "optimizer.lr_multipliers={layers.0: 0.1}"]
    equal_on_two_ranks(ranks, make, "pipeline", {"names": [*words, "optimizer.weight_decay=0.5"]}, 1e-10)


BF16 = {
    "masters": ["precision=bf16_pure", "optimizer=sgd", "optimizer.lr=0.5", "clip=norm", "clip.max_norm=0.5"],
    "masters, by norms": ["precision=bf16_pure", "optimizer=lars", "optimizer.lr=1", "optimizer.trust=0.02"],
    "stochastic": ["precision=bf16_pure", "precision.master=stochastic", "optimizer=sgd", "optimizer.lr=0.5"],
}


@pytest.mark.parametrize("strategy", ["fsdp", "tensor"])
@pytest.mark.slow
def test_weights_in_bfloat16(ranks, make, strategy):
    """Close, because gradients are rounded before they are summed, and random numbers round other weights; resuming is exact."""
    equal_on_two_ranks(ranks, make, strategy, BF16, 1e-2)


def test_an_optimizer_that_takes_a_norm_of_all_weights_has_no_owners(problems):
    words = ["parallel=fsdp", "parallel.nproc=2", "runtime.device=cpu", "optimizer=timm"]
    assert "max_grad_norm" in problems(*words, "optimizer.name=lamb")[0]
    assert "random numbers" in problems(*words, "optimizer.name=kron")[0]
    assert "precision=bf16_pure" in problems(*words, "precision=bf16_pure")[0]


def test_owners_share_out_the_largest_weights_first():
    class Mesh:
        mesh_dim_names = ("data", "tensor")

        def __getitem__(self, name):
            return type("Dimension", (), {"size": lambda self: 2})()

        def get_local_rank(self, name):
            return {"data": 1, "tensor": 0}[name]

    sizes = {"a": 10, "b": 7, "c": 5, "d": 4, "e": 1}
    weights = [(name, torch.nn.Parameter(torch.zeros(1)), (size,), ("data",)) for name, size in sizes.items()]
    whole = WholeWeights(weights, Mesh(), lambda *_: None, lambda *_: None)
    assert [name for name, own in whole.owned.items() if own] == ["b", "c", "e"]  # 13 of 27
    assert {p.device.type for p in whole.by_shard.values()} == {"cpu", "meta"}


# --- checkpoints of which every rank writes its parts: whole for one process, and exact for the ranks that go on from them ---


ADAMW = ["optimizer=adamw", "ema=ema", "clip=norm", "clip.max_norm=0.1"]
OF_PARTS = {
    "tensor": ["tensor", *ADAMW],
    "pipeline": ["pipeline", *ADAMW, "model.dropout=0.1"],
    "pipeline, stages of two": ["pipeline", *ADAMW, "parallel.schedule=interleaved", "model.hidden=[15,15,15,15,15]"],
    "state of whole weights": ["fsdp", "optimizer=muon", "ema=ema"],
    "state of other shapes": ["fsdp", "optimizer=shampoo", "optimizer.start=2", "optimizer.max_precondition_dim=64"],
    "lists of matrices": ["tensor", "optimizer=soap"],
    "of blocks on ranks": ["tensor", "optimizer=adafactor", "optimizer.eps1=1e-6"],
    "of layers": ["tensor", "optimizer=novograd"],
    "masters": ["fsdp", "precision=bf16_pure", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1"],
    "masters of slices": ["tensor", "precision=bf16_pure", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0.1"],
}
SAVED_PARTS = ["runtime.device=cpu", "runtime.threads=1", "saving=last", "saving.sharded=true", "updates=3", "parallel.nproc=2"]


def words_of_parts(case: str) -> list[str]:
    strategy, *words = OF_PARTS[case]
    split = ["batch=accumulate", "batch.accumulation_steps=2"] if strategy == "pipeline" else []
    return [*SAVED_PARTS, *STRATEGIES[strategy], *split, *words]


@pytest.mark.parametrize("case", [pytest.param(name, marks=[] if name == "pipeline" else pytest.mark.slow) for name in OF_PARTS])
def test_parts_are_the_whole_and_ranks_go_on_from_them_exactly(ranks, make, float64, tmp_path, case):
    (tmp_path / "run").mkdir()

    def work(world: World) -> Any:
        trainer = make(*words_of_parts(case), world=world)
        whole, unbroken = train_to(2, trainer), train_to(3, trainer)
        again = make(*words_of_parts(case), world=world)
        again.restore(*worker.load(tmp_path / "run/checkpoints/2", again.parallel))
        resumed = train_to(3, again)
        return [flat(list(full)) for full in (whole, unbroken, resumed)] if world.rank == 0 else None

    (whole, unbroken, resumed), _ = ranks(work)
    assert resumed == unbroken
    written = tmp_path / "run/checkpoints/2"
    alone = flat(list(checkpoint_io.load(written)))
    assert [key for key, value in whole.items() if key.startswith(("0.", "1.ema", "1.precision")) and alone[key] != value] == []
    pieces = [(name, piece) for name, of in files.read_json(written / "pieces.json", 2**20).items() for piece in of["pieces"]]
    assert {piece["file"] for _, piece in pieces} == {"__0_0.distcp", "__1_0.distcp"}
    assert len({(name, *piece["offsets"]) for name, piece in pieces}) == len(pieces)  # of what both hold, one wrote it


def test_a_part_of_a_fused_projection_is_a_part_of_each_of_its_matrices():
    """The second of two ranks has the lower half of q, k and v, which lie one below the other in the weight."""

    class FusedShard:
        shape, ndim = (3, 4, 2), 3

        def detach(self) -> torch.Tensor:
            return torch.arange(12.0).view(3, 2, 2)

        def __create_chunk_list__(self) -> list[Any]:
            return [ChunkStorageMetadata(torch.Size((0, 2, 0)), torch.Size((3, 2, 2)))]

    parts = parts_of(FusedShard(), (12, 2))
    assert [part.offsets for part in parts] == [(2, 0), (6, 0), (10, 0)]
    assert torch.equal(torch.cat([part.tensor for part in parts]), torch.arange(12.0).view(6, 2))
