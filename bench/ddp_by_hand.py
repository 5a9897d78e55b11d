"""DistributedDataParallel as one writes it by hand: `-m bench.ddp_by_hand RANKS UPDATES WIDTH BATCH`. Prints a step's ms."""

from __future__ import annotations

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WARMUP = 10


def rank(number: int, ranks: int, updates: int, width: int, batch: int) -> None:
    """One rank's script."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29517", RANK=str(number), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = torch.randn(65536, 192), torch.randint(10, (65536,))
    layers = [nn.Linear(192, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers, nn.Linear(width, 10)), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    share, times = batch // ranks, []
    for update in range(updates):
        began = time.perf_counter()
        at = (update * batch) % (len(x) - batch)
        indices = order[at + number * share : at + (number + 1) * share]
        loss = nn.functional.cross_entropy(model(x[indices]), y[indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    if number == 0:
        print(1e3 * statistics.median(times[WARMUP:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, updates, width, batch = map(int, sys.argv[1:])
    mp.spawn(rank, (ranks, updates, width, batch), nprocs=ranks)
