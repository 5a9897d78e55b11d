"""Two real ranks: forked processes that meet over gloo."""

import faulthandler
import os
import socket
import traceback
from multiprocessing import Pipe
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.machine.forking import ForkedProcess
from drivetrain.core.world import World

SECONDS = 120  # that two ranks may take


@pytest.fixture
def make(make):
    """`make(*words)`: a trainer. With `world=` on a rank: those that have met serve every further run of their processes."""

    def built(*words, **where):
        trainer = make(*words, **where)
        if where.get("world") and dist.is_initialized():
            dist.rendezvous = lambda *_, **__: iter([(dist.HashStore(), 0, 0)])
            dist.init_process_group = lambda *_, **__: None
        return trainer

    return built


@pytest.fixture
def ranks():
    """`ranks(work)`: what `work(world)` returns on each of two ranks, or of `count`."""

    def run(work: Any, count: int = 2) -> list[Any]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]

        dtype = torch.get_default_dtype()  # a fork has torch's own settings

        def rank(number: int, answer: Any) -> None:
            torch.set_default_dtype(dtype)
            given = {"RANK": number, "WORLD_SIZE": count, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
            faulthandler.dump_traceback_later(SECONDS - 10)  # where it is stuck
            os.environ.update({"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in given.items()}})
            try:
                answer.send(("done", work(World(number, count, number, count))))
            except BaseException:
                answer.send(("failed", traceback.format_exc()))
            os._exit(0)

        pipes = [Pipe(duplex=False) for _ in range(count)]
        processes = [ForkedProcess(target=rank, args=(n, theirs)) for n, (_, theirs) in enumerate(pipes)]
        try:
            for process in processes:
                process.start()
            answers = [ours.recv() if ours.poll(SECONDS) else ("failed", "no answer") for ours, _ in pipes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        assert all(outcome == "done" for outcome, _ in answers), "\n".join(str(v) for o, v in answers if o != "done")
        return [value for _, value in answers]

    return run
