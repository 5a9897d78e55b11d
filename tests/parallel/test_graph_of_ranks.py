"""compile=step with parallel=ddp: the all-reduce is in the graph, and an update is that of one process."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from drivetrain.core.world import World
from tests.parallel.test_whole_layers import stay_together

MLP = ["model=mlp", "model.hidden=[7]", "data.classes=3", "data.shape=[1,4,4]"]
CLIPPED = ["optimizer=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.9", "scheduler=cosine", "clip=norm", "clip.max_norm=0.1"]
SIX = ["batch.global_batch=12", "updates=6", "epochs=3"]
COMMON = ["runtime.device=cpu", "runtime.threads=1", "saving=none", *SIX]
CASES = {
    "sgd": [*MLP, "optimizer=sgd"],
    "accumulation": [*MLP, *CLIPPED, "batch=accumulate", "batch.accumulation_steps=3", "ema=ema"],
    "lamb": [*MLP, "optimizer=lamb"],
}


@pytest.fixture
def as_recorded(monkeypatch):
    """The graphs run as they were recorded: inductor's own work is left out."""
    graphs: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options=None: graphs.append(graph) or graph)
    yield graphs
    torch._dynamo.reset()


def trained(make: Any, words: list[str], world: World | None = None) -> dict[str, Any]:
    trainer = make(*COMMON, *words, world=world)
    trainer.fit()
    trainer.parallel.finish_collectives()
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


def alone(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("parallel")]


def assert_close(of_rank: dict[str, Any], one: dict[str, Any], to: float) -> None:
    assert of_rank.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.tensor(of_rank[name]), torch.tensor(value), rtol=to, atol=to)


@pytest.mark.parametrize(
    "case", [name if name == "accumulation" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_ranks_with_one_graph_are_one_process(ranks, make, float64, as_recorded, case):
    def work(world: World) -> Any:
        found = trained(make, ["parallel=ddp", "compile=step", *CASES[case]], world)
        names = [[str(node.target) for node in graph.graph.nodes] for graph in as_recorded]
        return found, sum(any("_c10d_functional.all_reduce" in name for name in of_graph) for of_graph in names), len(names)

    (first, reducing, count), (second, *_) = ranks(work)
    assert first == second
    assert_close(first, trained(make, alone(CASES[case])), 1e-10)
    assert reducing >= 1
    assert count == (2 if case == "accumulation" else reducing)  # the micro-batches before the last one reduce nothing


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulation", "sgd"])
def test_inductor_compiles_the_all_reduce(ranks, make, float64, case):
    def work(world: World) -> Any:
        return trained(make, ["parallel=ddp", "compile=step", *CASES[case]], world)

    first, second = ranks(work)
    assert first == second
    assert_close(first, trained(make, alone(CASES[case])), 1e-10)


@pytest.mark.slow
def test_an_overflow_of_one_rank_skips_the_update_of_all(ranks, make, as_recorded):
    words = [*MLP, "precision=amp", f"precision.init_scale={2.0**13}", "precision.growth_interval=1", "epochs=9", "updates=8"]

    def work(world: World) -> Any:
        found = {}
        for compiler in ("none", "step"):
            trainer = make(*COMMON, *words, "parallel=ddp", f"compile={compiler}", world=world)
            stay_together()
            trainer.fit()
            trainer.parallel.finish_collectives()
            found[compiler] = trainer.progress.skipped, trainer.precision.scaler.get_scale()
        return found

    first, second = ranks(work)
    assert first == second
    assert first["none"] == first["step"]
    assert first["step"][0] > 0


class ReadsOnRankOne(nn.Module):
    """A model that cannot be recorded on one of the ranks: it reads a value back there."""

    def __init__(self, shape, classes):
        super().__init__()
        self.head = nn.Linear(shape[0] * shape[1] * shape[2], classes)

    def forward(self, x):
        out = self.head(x.flatten(1))
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1 and float(out.detach().sum()) > 1e9:
            return out
        return out * 1.0


def test_where_one_rank_cannot_record_all_go_on_without_graphs(ranks, make, float64, as_recorded, monkeypatch, caplog):
    """The all-reduce is the same whichever way a rank computes its gradients, and after that update they agree, to the bit."""
    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", lambda model, **_: model)
    own = ["model=own", f"model.target={__name__}.ReadsOnRankOne", "trust=[tests]", "data.classes=3", "data.shape=[1,4,4]"]

    def work(world: World) -> Any:
        with caplog.at_level(logging.WARNING):
            found = trained(make, ["parallel=ddp", "compile=step", *own], world)
        return found, len(as_recorded), [line for line in caplog.messages if "cannot be one graph" in line]

    (first, recorded, (told,)), (second, not_recorded, (and_told,)) = ranks(work)
    assert (recorded, not_recorded) == (1, 0)
    assert "another rank cannot record it" in told
    assert "out of a tracing" in and_told
    assert first == second
    assert_close(first, trained(make, own), 1e-10)


def test_what_a_graph_of_ranks_cannot_do_is_refused(problems):
    words = ("parallel=ddp", "parallel.nproc=2", "runtime.device=cpu", "compile=step")
    for setting in (
        "parallel.compress=powersgd",
        "parallel.find_unused_parameters=true",
        "parallel.gradient_as_bucket_view=false",
    ):
        (told,) = problems(*words, setting)
        assert setting in told
        assert "compile=inductor" in told
    assert "hooks" in problems("parallel=fsdp", "runtime.device=cpu", "compile=step")[0]
