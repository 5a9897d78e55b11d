"""Sharded models on a fake device: one of two ranks, whose collectives return at once."""

import pytest
import torch.distributed as dist

from drivetrain.core.world import World
from tests.cuda.test_options import SEVERAL_RANKS
from tests.support import fake_device
from tests.test_contract import ids, words_of

VARIANTS = {
    ("parallel", "fsdp"): [
        [],
        ["parallel.replicate=2", "clip=norm", "ema=ema"],
        ["parallel.sync_each_micro=true", "batch=accumulate", "batch.accumulation_steps=2"],
    ],
}


@pytest.mark.parametrize("option", SEVERAL_RANKS, ids=ids(SEVERAL_RANKS))
def test_it_trains_and_its_steps_do_not_wait(fake_run, monkeypatch, option):
    for words in VARIANTS.get(option, [[]]):
        fake_device.pretend_ranks(monkeypatch, "lazy", 2)
        try:
            given = [*words_of(option), "parallel.nproc=2", "saving=none", *words]
            trainer, device = fake_run("lazy", *given, world=World(0, 2, 0, 2))
            assert trainer.progress.updates == 2
            assert not device.waits
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            monkeypatch.undo()
