"""With more than two ranks the order of sums over them counts: a resumed run adds in the order of the unbroken one."""

from typing import Any

import pytest

from drivetrain.core.world import World
from drivetrain.measure.rehearse import flat
from tests.support.ranks import train_to

BASE = ["parallel=ddp", "parallel.nproc=4", "runtime.device=cpu", "runtime.threads=1", "saving=none", "updates=5"]
CASES = {
    "layers": ["model=resnet9"],
    "several buckets": ["model=mlp", "model.hidden=[64,32,48]", "parallel.bucket_mb=0.01"],
    "micro-batches": ["model=mlp", "batch=accumulate", "batch.accumulation_steps=2", "batch.global_batch=16"],
    "draws": ["model=mlp", "model.dropout=0.3", "ema=ema"],
    "sent in 16 bits": ["model=mlp", "parallel.compress=bf16"],
    "averages": ["model=resnet9", "precision=bf16", "clip=norm"],
    "a loss of several": ["model=mlp", "loss=[cross_entropy,focal]"],
}


@pytest.mark.parametrize("case", [pytest.param(n, marks=[] if n == "layers" else pytest.mark.slow) for n in CASES])
def test_four_ranks_go_on_to_the_same_bits(ranks, make, case):
    words = [*BASE, *CASES[case]]

    def work(world: World) -> Any:
        trainer = make(*words, world=world)
        saved = trainer.parallel.broadcast_object(train_to(2, trainer))
        whole = train_to(5, trainer)
        again = make(*words, world=world)
        again.restore(*saved)
        resumed = train_to(5, again)
        return (flat(list(whole)), flat(list(resumed))) if world.rank == 0 else None

    (whole, resumed), *_ = ranks(work, 4)
    differ = [key for key, value in whole.items() if resumed[key] != value and not key.startswith("1.log")]
    assert len(whole) > 10
    assert differ == []
