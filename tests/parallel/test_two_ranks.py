"""Unit tests of two real ranks: forked processes, each of which builds its part of a tiny run."""

import copy
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor
from torch import nn

from drivetrain.core.errors import Interrupted, UserError
from drivetrain.core.machine.signals import StopFlag
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.engine.context import RunContext
from drivetrain.engine.staged_run import StagedRun
from drivetrain.launch import launcher
from drivetrain.parallel.base import OwnGradients
from drivetrain.parallel.pipeline_stages import PipelineStep
from drivetrain.precision import cpu_half
from drivetrain.precision.base import Precision
from tests.engine.test_stages import LENGTHS, TEXTS
from tests.support import slow
from tests.support.ranks import weights

SHARDS = ["parallel=fsdp", "parallel.nproc=2", "model.hidden=[16]", "runtime.device=cpu", "runtime.threads=1"]


def sharded_weights(model: torch.nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return all(isinstance(p, DTensor) for p in model.parameters())


def test_flags_sums_objects_random_numbers_and_other_configs(ranks, make):
    """One rank's flag is all ranks', once, though it stays raised until they have heard of it; dropout draws differ."""

    def work(world: World) -> Any:
        trainer = make("parallel=ddp", "parallel.nproc=2", "runtime.device=cpu", world=world)
        parallel = trainer.parallel
        flags = [parallel.all_reduce_flag(2 if world.rank == 1 and n in (1, 2) else 0) for n in range(5)]
        parallel._work.seconds = lambda: float(world.rank)
        slowest = [parallel.rank_metrics(2.0, 0.0) for _ in range(2)]
        context = SimpleNamespace(config_hash=f"hash {world.rank}", config={"optimizer.lr": 0.1 + world.rank})
        with pytest.raises(UserError, match=r"optimizer.lr is 0.1 and 1.1"):
            parallel._check_same_start(context)
        return (
            flags, float(parallel.all_reduce_sum(torch.tensor(1.0 + world.rank))), parallel.broadcast_object(world.rank),
            float(torch.rand(())), float(sum(p.double().sum() for p in trainer.model.parameters())), slowest,
        )  # fmt: skip

    (flags, total, first, draw, weights, slowest), other = ranks(work)
    assert flags == other[0] == [0, 0, 2, 0, 0]
    assert total == other[1] == 3.0
    assert first == other[2] == 0
    assert draw != other[3]
    assert weights == other[4]
    assert [s["slowest_rank"] for s in slowest] == [1, 0]  # at the second call no rank has worked since the first one
    assert [s["rank_work_excess"] for s in slowest] == [0.25, 0.0]


def test_ranks_agree_every_few_updates_and_save_at_the_counted_ones(ranks, make):
    """One rank's steps take up to 12.5 ms and it is told to stop: all stop alike, within twice 4 updates. Saves do not wait."""
    words = ["parallel=ddp", "parallel.nproc=2", "runtime.device=cpu", "log_every=2", "data.samples=1200", "updates=40"]

    def work(world: World) -> Any:
        trainer = make(*words, "saving.every_updates=5", "saving.keep=9", world=world)
        asked, saved, stop, agree, save = [], [], StopFlag(), trainer.agree, trainer.save
        trainer.timer.percentiles = lambda: (1.0, (5.0, 12.5)[world.rank])

        def counted() -> int:
            asked.append(trainer.progress.steps)
            stop.raised = stop.raised or (world.rank == 1 and trainer.progress.steps >= 8)
            return agree()

        trainer.agree, trainer.save = counted, lambda: saved.append(trainer.progress.updates) or save()
        with pytest.raises(Interrupted):
            trainer.fit(stop)
        return asked, saved, trainer.progress.updates

    first, other = ranks(work)
    assert first == other == ([1, 2, 4, 8, 12], [5, 10, 12], 12)


def test_an_evaluation_with_a_tail_that_does_not_divide_counts_each_sample_once(ranks, make):
    """Batches of six: two, of which the second has five; one for two ranks; and three, so that one rank's last only fills up."""
    cases = [["model.hidden=[16]", f"data.test_samples={samples}"] for samples in (11, 5, 17)]

    def work(world: World) -> Any:
        trainers = (make(*SHARDS, *words, world=world) for words in cases)
        return [(trainer.evaluator.metrics(), sharded_weights(trainer.model)) for trainer in trainers]

    alone = [make(*words).evaluator.metrics() for words in cases]
    for found in ranks(work):
        for (of_shards, sharded), of_one in zip(found, alone, strict=True):
            assert of_shards == pytest.approx(of_one, rel=1e-5)
            assert sharded


def test_fsdp_gathers_and_frees_weights_when_it_should(ranks, make):
    """After the forward they are freed, unless the run keeps them for the backward; after an evaluation they always are."""

    def work(world: World) -> Any:
        found = []
        for reshard in ("false", "true"):
            trainer = make(*SHARDS, f"parallel.reshard_after_forward={reshard}", world=world)
            x = next(trainer.read()).x
            trainer.model.train()
            trainer.evaluator.forward(x)
            found.append(sharded_weights(trainer.model))
            with trainer.parallel.evaluation_context():
                trainer.evaluator.forward(x)
            found.append(sharded_weights(trainer.model))
        return found

    assert ranks(work) == [[False, True, True, True]] * 2


def test_fsdp_reduces_gradients_once_an_update(ranks, make, fitted):
    """Of three micro-batches the last one alone, unless the run asks for all; the gradients are then those of both ranks."""
    words = ["updates=2", "model.hidden=[16]", "clip=norm", "clip.max_norm=0.01", "batch=accumulate"]

    def work(world: World) -> Any:
        found = []
        for each in ("false", "true"):
            split = ["batch.accumulation_steps=3", f"parallel.sync_each_micro={each}"]
            trainer = make(*SHARDS, *words, *split, world=world)
            reduced, group = [], trainer.model._get_fsdp_state()._fsdp_param_group
            after = group.post_backward

            def counted(*args: Any, reduced=reduced, group=group, after=after) -> None:
                reduced.append(group.reduce_grads)
                after(*args)

            group.post_backward = counted
            trainer.fit()
            found.append((weights(trainer), sum(reduced)))
        return found

    alone = fitted(*words, "batch.accumulation_steps=6")
    first, second = ranks(work)
    assert [count for _, count in first] == [count for _, count in second] == [2, 6]
    for of_ranks, _ in first:
        for name, weight in alone.model.state_dict().items():
            torch.testing.assert_close(torch.tensor(of_ranks[name]), weight, rtol=1e-5, atol=1e-7)


def test_shards_are_gathered_in_float32_where_layers_stay_in_it(ranks, fitted, monkeypatch):
    """On a CPU that is slow in bfloat16: weights in bfloat16 do not fit activations in float32. Elsewhere they are bfloat16."""

    def work(world: World) -> Any:
        found = []
        for slowness in (9.0, 1.0):
            monkeypatch.setattr(cpu_half, "measure", lambda *_, slow=slowness: slow)
            trainer = fitted(*SHARDS, "precision=bf16", "updates=1", world=world)
            found.append(trainer.model._get_fsdp_state()._mp_policy.param_dtype)
        return found

    assert ranks(work) == [[None, torch.bfloat16]] * 2


def test_parts_of_a_recomputed_block_that_are_sharded_by_themselves(ranks, fitted):
    """With weights in bfloat16 a block's norms stay in float32, as shards of their own within it."""
    words = ["model=resnet9", "model.width=4", "data.shape=[3,8,8]", "precision=bf16_pure", "optimizer=sgd", "saving=none"]
    sharded = ["parallel=fsdp", "parallel.nproc=2", "runtime.device=cpu", "runtime.threads=1", "updates=2"]

    def work(world: World) -> Any:
        options = ("none", "selective", "blocks")
        return [weights(fitted(*words, *sharded, f"checkpointing={option}", world=world)) for option in options]

    (plain, *recomputed), _ = ranks(work)
    assert recomputed == [plain] * 2
    assert plain


def test_an_overflow_in_one_shard_skips_the_update_on_all_ranks(ranks, make):
    def work(world: World) -> Any:
        trainer = make(*SHARDS, "precision=amp", "precision.init_scale=8.0", world=world)
        trainer.model.train()
        stream = trainer.read()
        trainer.step.micro_batch(next(stream), torch.zeros(()))
        if world.rank == 1:
            next(trainer.model.parameters()).grad.to_local().fill_(float("inf"))
        return bool(trainer.step.update()), trainer.precision.scaler.get_scale()

    assert ranks(work) == [(False, 4.0)] * 2


def test_each_micro_batch_of_a_pipeline_has_its_own_weight():
    """Micro-batches of one shape may have other weights, as sequences of other lengths have."""
    batches = [MicroBatch(torch.full((2, 1), float(n)), torch.zeros(2), torch.tensor(w), n == 1, False)
               for n, w in enumerate((0.5, 1.5), 1)]  # fmt: skip
    step = PipelineStep.__new__(PipelineStep)
    step._pipeline, step._overwriting = SimpleNamespace(my_stages=[0], ranges=[(0, 1)]), set()
    loss = SimpleNamespace(step=lambda forward, batch: forward(batch.x).mean())
    step._precision, step._loss, step._stage_forward = Precision(), loss, lambda stage, h, x: x
    scaled = []

    def run(*x: torch.Tensor, number: torch.Tensor, **_: Any) -> None:
        for n in number:
            scaled.append(float(step._loss_of(step._forward(0, x[0], int(n)), n)))

    step._schedules = {(2, batches[0].x.shape): SimpleNamespace(step=run)}
    total = torch.zeros(())
    step._run(batches, total)
    assert scaled == [0.5, 3.0]
    assert float(total) == 3.5


SHARED = "ddp parallel.shard_optimizer=true"
STAGED = {
    "parts": [
        "optimizer=adamw", "scheduler=cosine", "epochs=3", "updates=null", "model.hidden=[16]",
        "stages=[{until: 1ep, model.freeze: ['layers.0.*'], batch.global_batch: 24}, {until: 2ep, ema: ema}, {clip: norm}]",
    ],
    "lengths": [*(word for word in TEXTS if "dropout" not in word), LENGTHS],
}  # fmt: skip


@pytest.mark.parametrize("case", STAGED)
@pytest.mark.parametrize("strategy", ["ddp", *(pytest.param(words, marks=pytest.mark.slow) for words in ("fsdp", SHARED))])
def test_stages_on_two_ranks_equal_those_in_one_process(ranks, tiny, tmp_path, strategy, case, float64):
    """Each stage is built by both ranks, with parameters that begin to train, another batch, and an average of the weights."""
    words = tiny(*STAGED[case], "saving=none", "runtime.device=cpu", "runtime.threads=1")

    def work(world: World, *more: str) -> Any:
        context = RunContext(launcher.prepare([*words, *more]).run, world, tmp_path / "run")
        staged = StagedRun(context, [])
        staged.build()
        staged.fit()
        context.on_exit.close()
        return weights(staged.trainer), staged.number

    one, number = work(World())
    two, _ = ranks(lambda world: work(world, *f"parallel={strategy}".split(), "parallel.nproc=2"))
    assert number == two[1] == 2
    for name, weight in one.items():
        torch.testing.assert_close(torch.tensor(two[0][name]), torch.tensor(weight), atol=1e-10, rtol=0)


def test_schedule_free_averages_are_those_of_one_process_on_each_rank_also_where_a_run_goes_on(ranks, make, float64):
    """The weights that are evaluated and saved, what the evaluation says of them, and those that train on."""
    words = ["optimizer=schedulefree", "optimizer.lr=0.05", "updates=6", "model.hidden=[16]", "saving=none", "runtime.threads=1"]

    def held(trainer: Any) -> dict[str, Any]:
        return {name: t.tolist() for name, t in trainer.model.state_dict().items()}

    def ended(trainer: Any) -> list[Any]:
        """The average, its loss, and the weights that are trained, which an evaluation puts back bit for bit."""
        trainer.max_updates = 6
        trainer.fit()
        trained, loss = held(trainer), trainer.log.writers[0][-1]["loss"]
        with trainer.evaluator.eval_weights():
            average = held(trainer)
        assert held(trainer) == trained != average
        return [average, trained, loss]

    def stops_and_goes_on(world: World) -> Any:
        trainer = make(*words, "parallel=ddp", "parallel.nproc=2", "runtime.device=cpu", world=world)
        trainer.max_updates = 3
        trainer.fit()
        with trainer.evaluator.eval_weights():
            middle = copy.deepcopy((dict(trainer.model.state_dict()), trainer.state()))
        found = ended(trainer)
        trainer.restore(*middle)
        assert ended(trainer) == found
        return found

    one = ended(make(*words))
    first, second = ranks(stops_and_goes_on)
    assert first == second
    for ours, theirs in zip(one[:2], first[:2], strict=True):
        for name, value in ours.items():
            torch.testing.assert_close(torch.tensor(theirs[name]), torch.tensor(value), rtol=1e-10, atol=1e-12)
    assert first[2] == pytest.approx(one[2], rel=1e-10)


# --- each rank's share of the noise scale is that of one process which has the rank's micro-batch as its first one ---


COMMON = ["updates=4", "log_every=100", "runtime.device=cpu", "runtime.threads=1", "saving=none"]
MLP = ["model=mlp", "model.hidden=[15,16]", "data.classes=3"]  # parts that are not equal
VIT = [
    "model=timm", "model.name=vit_tiny_patch16_224", "data.shape=[3,8,8]",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 2, embed_dim: 12, num_heads: 2}",
]  # fmt: skip
HALVES = ["batch=accumulate", "batch.accumulation_steps=2"]
QUARTERS = ["batch=accumulate", "batch.accumulation_steps=4"]


def sums(make: Any, words: list[str], **more: Any) -> tuple[list[float], list[Any]]:
    """The two estimates that a rank has summed, and its weights, where every update is measured."""
    trainer = make(*COMMON, *words, **more)
    trainer.log.noise.every = 1
    trainer.log.restart = lambda *_: None  # keeps the sums
    trainer.fit()
    return trainer.log.noise.sums.tolist(), list(weights(trainer).values())


def of_ranks(ranks: Any, make: Any, runs: list[list[str]], count: int = 2) -> list[Any]:
    """What `sums` gives on each rank, run by run."""

    def work(world: World) -> Any:
        run_dir = Path(f"rank{world.rank}")
        return [sums(make, [*words, f"parallel.nproc={count}"], world=world, run_dir=run_dir) for words in runs]

    return list(zip(*ranks(work, count), strict=True))


def test_it_is_that_of_accumulation(ranks, make):
    both = [[*MLP, unequal] for unequal in ("batch.global_batch=12", "data.samples=45")]  # an epoch's last update has 9 samples
    found = of_ranks(ranks, make, [[f"parallel={strategy}", *words] for words in both for strategy in ("ddp", "fsdp")])
    for words, of_strategies in zip(both, (found[:2], found[2:]), strict=True):
        accumulated, same = sums(make, [*HALVES, *words])
        for (first, trained), (second, _) in of_strategies:
            assert first == pytest.approx(accumulated, rel=1e-4)
            assert second != pytest.approx(first, rel=1e-2)  # of other samples
            assert all(torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(trained, same, strict=True))


KEPT = ["parallel=fsdp", "parallel.reshard_after_forward=false", "checkpointing=blocks"]
FIRST = [  # the words of the ranks, those of one process, and which micro-batch each rank has first
    (["parallel=fsdp", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),  # gradients are summed up whole on each rank
    (["parallel=tensor", *HALVES, *VIT], [*HALVES, *VIT], [0, 0]),  # the ranks of a block have the same samples
    (["parallel=fsdp", "parallel.sync_each_micro=true", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),
    ([*KEPT, *HALVES, *VIT], [*QUARTERS, *VIT], [0, 1]),
    (["parallel=ddp", *HALVES, *MLP], [*QUARTERS, *MLP], [0, 1]),
    (["parallel=tensor", "parallel.size=2", *VIT], [*HALVES, *VIT], [0, 0, 1, 1]),
    (["parallel=fsdp", "parallel.replicate=2", *VIT], [*QUARTERS, *VIT], [0, 1, 2, 3]),
]


@pytest.mark.parametrize("cases", slow.but(FIRST[:2].__eq__, [FIRST[:2], *([case] for case in FIRST[2:])]))
def test_a_rank_measures_its_first_micro_batch_and_counts_each_weight_once(ranks, make, cases):
    of_cases = of_ranks(ranks, make, [words for words, *_ in cases], len(cases[0][-1]))
    for found, (_, alone, first) in zip(of_cases, cases, strict=True):
        one = sums(make, alone)[0]
        for (sums_, _), micro_batch in zip(found, first, strict=True):
            assert (sums_ == pytest.approx(one, rel=1e-4)) == (micro_batch == 0)
            assert micro_batch == 0 or sums_ != pytest.approx(one, rel=1e-2)


def test_measuring_leaves_no_hook_and_changes_nothing(ranks, make):
    """The weights are the same, bit for bit, as where the first update alone is measured."""

    def work(world: World) -> Any:
        found = []
        for every in (1, 100):
            trainer = make(*COMMON, *MLP, "parallel=fsdp", "parallel.nproc=2", world=world, run_dir=Path(f"{world.rank}"))
            trainer.log.noise.every = every
            trainer.fit()
            hooks = sum(len(module._forward_pre_hooks) for module in trainer.model.modules())
            found.append(([p.to_local().tolist() for p in trainer.model.parameters()], hooks))
        return found

    for often, once in ranks(work):
        assert often == once


def test_a_gradient_that_is_taken_twice_counts_once():
    weight = torch.ones(3, requires_grad=True)
    own = OwnGradients()
    own.watch(weight)
    own.watch(weight)  # as where recomputation runs the forward again
    (weight * torch.arange(3.0)).sum().backward()
    assert own.squares()[()] == pytest.approx(5.0)
    own.leave()
    assert not weight._backward_hooks


# --- compile=step with parallel=ddp: the all-reduce is in the graph, and an update is that of one process ---


SMALL = ["model=mlp", "model.hidden=[7]", "data.classes=3", "data.shape=[1,4,4]"]
CLIPPED = ["optimizer=sgd", "optimizer.lr=0.2", "optimizer.momentum=0.9", "scheduler=cosine", "clip=norm", "clip.max_norm=0.1"]
SIX = ["batch.global_batch=12", "updates=6", "epochs=3"]
RECORDED = ["runtime.device=cpu", "runtime.threads=1", "saving=none", *SIX]
GRAPHS = {
    "sgd": [*SMALL, "optimizer=sgd"],
    "accumulation": [*SMALL, *CLIPPED, "batch=accumulate", "batch.accumulation_steps=3", "ema=ema"],
    "lamb": [*SMALL, "optimizer=lamb"],
}


def weights_of(fitted: Any, words: list[str], world: World | None = None) -> dict[str, Any]:
    trainer = fitted(*RECORDED, *words, world=world)
    trainer.parallel.finish_collectives()
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


def alone(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("parallel")]


def assert_close(of_rank: dict[str, Any], one: dict[str, Any], to: float) -> None:
    assert of_rank.keys() == one.keys()
    for name, value in one.items():
        torch.testing.assert_close(torch.tensor(of_rank[name]), torch.tensor(value), rtol=to, atol=to)


@pytest.mark.parametrize(
    "case", [name if name == "accumulation" else pytest.param(name, marks=pytest.mark.slow) for name in GRAPHS]
)
def test_ranks_with_one_graph_are_one_process(ranks, fitted, float64, recorded, case):
    def work(world: World) -> Any:
        found = weights_of(fitted, ["parallel=ddp", "compile=step", *GRAPHS[case]], world)
        names = [[str(node.target) for node in graph.graph.nodes] for graph in recorded]
        return found, sum(any("_c10d_functional.all_reduce" in name for name in of_graph) for of_graph in names), len(names)

    (first, reducing, count), (second, *_) = ranks(work)
    assert first == second
    assert_close(first, weights_of(fitted, alone(GRAPHS[case])), 1e-10)
    assert reducing >= 1
    assert count == (2 if case == "accumulation" else reducing)  # the micro-batches before the last one reduce nothing


@pytest.mark.slow
@pytest.mark.parametrize("case", ["accumulation", "sgd"])
def test_inductor_compiles_the_all_reduce(ranks, fitted, float64, case):
    def work(world: World) -> Any:
        return weights_of(fitted, ["parallel=ddp", "compile=step", *GRAPHS[case]], world)

    first, second = ranks(work)
    assert first == second
    assert_close(first, weights_of(fitted, alone(GRAPHS[case])), 1e-10)


@pytest.mark.slow
def test_an_overflow_of_one_rank_skips_the_update_of_all(ranks, fitted, recorded):
    words = [*SMALL, "precision=amp", f"precision.init_scale={2.0**13}", "precision.growth_interval=1", "epochs=9", "updates=8"]

    def work(world: World) -> Any:
        found = {}
        for compiler in ("none", "step"):
            trainer = fitted(*RECORDED, *words, "parallel=ddp", f"compile={compiler}", world=world)
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


def test_where_one_rank_cannot_record_all_go_on_without_graphs(ranks, fitted, float64, recorded, monkeypatch, caplog):
    """The all-reduce is the same whichever way a rank computes its gradients, and after that update they agree, to the bit."""
    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", lambda model, **_: model)
    own = ["model=own", f"model.target={__name__}.ReadsOnRankOne", "trust=[tests]", "data.classes=3", "data.shape=[1,4,4]"]

    def work(world: World) -> Any:
        with caplog.at_level(logging.WARNING):
            found = weights_of(fitted, ["parallel=ddp", "compile=step", *own], world)
        return found, len(recorded), [line for line in caplog.messages if "cannot be one graph" in line]

    (first, graphs, (told,)), (second, no_graphs, (and_told,)) = ranks(work)
    assert (graphs, no_graphs) == (1, 0)
    assert "another rank cannot record it" in told
    assert "out of a tracing" in and_told
    assert first == second
    assert_close(first, weights_of(fitted, own), 1e-10)


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
