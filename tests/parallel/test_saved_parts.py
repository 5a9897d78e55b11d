"""Checkpoints of which every rank writes its parts: whole for one process, and exact for the ranks that go on from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from drivetrain.core import files
from drivetrain.core.world import World
from drivetrain.launch import worker
from drivetrain.parallel.sharded import parts_of
from drivetrain.saving import checkpoint_io
from tests.parallel.test_whole_layers import STRATEGIES, stay_together
from tests.support.same_end import flat

ADAMW = ["optimizer=adamw", "ema=ema", "clip=norm", "clip.max_norm=0.1"]
CASES = {
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
COMMON = ["runtime.device=cpu", "runtime.threads=1", "saving=last", "saving.sharded=true", "updates=3", "parallel.nproc=2"]


def words_of(case: str) -> list[str]:
    strategy, *words = CASES[case]
    split = ["batch=accumulate", "batch.accumulation_steps=2"] if strategy == "pipeline" else []
    return [*COMMON, *STRATEGIES[strategy], *split, *words]


@pytest.fixture(autouse=True)
def _run_directory(tmp_path):
    (tmp_path / "run").mkdir()


@pytest.mark.parametrize("case", [pytest.param(name, marks=[] if name == "pipeline" else pytest.mark.slow) for name in CASES])
def test_parts_are_the_whole_and_ranks_go_on_from_them_exactly(ranks, make, float64, tmp_path, case):
    def train_to(update: int, trainer: Any) -> Any:
        trainer.max_updates = update
        trainer.fit()  # and save this rank's parts
        full = trainer.parallel.full_state_dict(trainer.model, trainer.state())
        trainer.parallel.finish_collectives()
        return flat(list(full))

    def work(world: World) -> Any:
        trainer = make(*words_of(case), world=world)
        stay_together()
        whole, unbroken = train_to(2, trainer), train_to(3, trainer)
        again = make(*words_of(case), world=world)
        again.restore(*worker.load(tmp_path / "run/checkpoints/2", again.parallel))
        return [whole, unbroken, train_to(3, again)] if world.rank == 0 else train_to(3, again) and None

    (whole, unbroken, resumed), _ = ranks(work)
    assert resumed == unbroken
    saved = tmp_path / "run/checkpoints/2"
    weights, state = checkpoint_io.load(saved)
    alone = flat([weights, state])
    assert [key for key, value in whole.items() if key.startswith((".0", ".1.ema", ".1.precision")) and alone[key] != value] == []
    pieces = [(name, piece) for name, of in files.read_json(saved / "pieces.json", 2**20).items() for piece in of["pieces"]]
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
