"""What a collective of a model's weights takes on these ranks, in ms: under torchrun, `-m bench.collectives WIDTH`. JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from drivetrain.core.device import keep_freed_memory


def main() -> None:
    """All-reduce, gathering and scattering of the weights of bench.scale's network, with the copies that go with them."""
    width = int(sys.argv[1])
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    layers = [192 * width + width, width * width + width, width * width + width, width * 10 + 10]
    layers = [count + -count % ranks for count in layers]
    wholes, parts = ([torch.zeros(count // share) for count in layers] for share in (1, ranks))
    whole = torch.zeros(sum(layers))

    # ddp's gradients meet in one bucket, fsdp's weights layer by layer.
    def gather() -> None:
        for part in parts:  # into a buffer, and from there to where the weights are used
            buffer = torch.empty(len(part) * ranks)
            dist.all_gather_into_tensor(buffer, part.clone())
            torch.empty_like(buffer).copy_(buffer)

    def scatter() -> None:
        for gradient, part in zip(wholes, parts, strict=True):
            dist.reduce_scatter_tensor(part, torch.cat(gradient.chunk(ranks)))
            part.div_(ranks)

    collectives: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "gather": gather,
        "scatter": scatter,
    }
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
