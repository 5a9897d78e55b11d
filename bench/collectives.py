"""What a collective of a model's weights takes on these ranks, in ms: under torchrun, `-m bench.collectives WIDTH`. JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def main() -> None:
    """All-reduce, all-gather and reduce-scatter of the weights of bench.scale's network."""
    width = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    count = 192 * width + width + 2 * (width * width + width) + width * 10 + 10
    count += count % 2
    whole, part = torch.zeros(count), torch.zeros(count // dist.get_world_size())
    parts = list(whole.view(dist.get_world_size(), -1))
    collectives: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    assert len(parts) * len(part) == count
    found = {}
    for name, call in collectives.items():
        times = []
        for _ in range(15):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        found[name] = 1e3 * statistics.median(times[3:])
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
