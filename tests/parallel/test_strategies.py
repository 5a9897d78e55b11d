"""Every strategy of several processes against one process with the same global batch: losses, weights, states, evaluations."""

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.cli import main
from drivetrain.core.world import World
from drivetrain.parallel import fsdp
from drivetrain.run.result import Result
from drivetrain.saving import checkpoint_io
from tests.clip.test_clip import BITES
from tests.parallel.test_whole_layers import by_name
from tests.support import command
from tests.support.command import records
from tests.support.ranks import saved
from tests.support.to_end import run_to_end

RUN = [
    "data=synthetic", "data.shape=[3,8,8]", "data.classes=4", "data.samples=57", "data.test_samples=7", "data.drop_last=false",
    "scheduler=constant", "batch.global_batch=24", "log_every=1", "epochs=2", "updates=6", "runtime.device=cpu",
    "runtime.threads=1",
]  # fmt: skip
DOUBLE = ["model=own", "model.target=double_nets.vit", "trust=[double_nets]"]
VIT = [
    "model=timm", "model.name=vit_tiny_patch16_224",
    "model.kwargs={img_size: 8, patch_size: 4, depth: 4, embed_dim: 24, num_heads: 2}",
]  # fmt: skip
STRATEGIES = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp"],
    "fsdp, more gathered": ["parallel=fsdp", "parallel.sync_each_micro=true", "parallel.reshard_after_forward=false"],
    "hybrid": ["parallel=fsdp", "parallel.nproc=4", "parallel.replicate=2"],
    "tensor": ["parallel=tensor"],
    "tensor × fsdp": ["parallel=tensor", "parallel.nproc=4", "parallel.size=2"],
    "pipeline": ["parallel=pipeline"],
    "pipeline × data": ["parallel=pipeline", "parallel.nproc=4", "parallel.stages=2", "parallel.schedule=gpipe"],
    "pipeline × fsdp": ["parallel=pipeline", "parallel.nproc=4", "parallel.stages=2", "parallel.shard_stages=true"],
    "pipeline × tensor": ["parallel=pipeline", "parallel.nproc=4", "parallel.tensor=2"],
    "all three": [
        "parallel=pipeline", "parallel.nproc=8", "parallel.stages=2", "parallel.tensor=2", "parallel.shard_stages=true",
    ],
    "split": ["parallel=split", "parallel.devices=[cpu,cpu]"],
    "dp": ["parallel=dp"],
}  # fmt: skip
SETTINGS = {
    "all that must be exact": [
        *DOUBLE, "optimizer=adamw", "optimizer.eps=1e-4", "batch=accumulate", "batch.accumulation_steps=3", "clip=norm",
        "clip.max_norm=0.1", "ema=ema", "ema.decay=0.5", "checkpointing=every_k",
    ],
    "bf16": [*VIT, "optimizer=sgd", "optimizer.lr=0.05", "precision=bf16", "clip=value"],
    "amp": [*VIT, "optimizer=sgd", "optimizer.lr=0.05", "precision=amp", "precision.init_scale=256.0",
        "batch=accumulate", "batch.accumulation_steps=2"],
}  # fmt: skip
CLOSE = {"all that must be exact": 1e-9, "bf16": 5e-3, "amp": 5e-3}


def whole(words: Sequence[str]) -> list[str]:
    """The words of a run on images, or on texts, whose words are whole already."""
    return [*([] if "loss=next_token" in words else RUN), *words]


class Ended(NamedTuple):
    """What a run has come to."""

    losses: list[float]
    evaluated: dict[str, float]
    weights: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]


def of_files(result: Result) -> Ended:
    """The end of a run by the files that it left."""
    assert result.status == "completed", result.error
    weights, state = checkpoint_io.load(Path(result.run_dir) / "checkpoints" / str(result.updates))
    losses = [record["loss"] for record in records(result.run_dir, "train")]
    assert len(losses) == result.updates
    return Ended(losses, result.judged("final"), weights, by_name(state["optimizer"]))


def of_trainer(trainer: Any) -> Ended | None:
    """Train; the end of the run, on rank 0."""
    trainer.fit()
    weights, state = saved(trainer)
    if trainer.parallel.world.rank:
        return None
    *_, evaluated = told = trainer.log.writers[0]
    losses = [record["loss"] for record in told if record["event"] == "train"]
    judged = {name: evaluated[name] for name in ("loss", "accuracy", "ema_loss", "ema_accuracy") if name in evaluated}
    return Ended(losses, judged, weights, by_name(state["optimizer"]))


@pytest.fixture(scope="module", autouse=True)
def _nets():
    """double_nets can be imported, here and by the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(command.HERE)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """`done(words)`: the result of a run of them, run once for all tests."""

    @cache
    def run(*words: str) -> Result:
        return drivetrain.train([*whole(words), f"output_dir={tmp_path_factory.mktemp('runs')}"])

    return run


def equal(a: Ended, b: Ended, to: float, what: str = "") -> None:
    assert b.losses == pytest.approx(a.losses, rel=max(to, 1e-6)), what  # summed in float32
    assert b.losses != a.losses[:1] * len(a.losses), f"{what}: it has learnt something"
    assert b.evaluated == pytest.approx(a.evaluated, rel=max(to, 1e-6), abs=to), what
    for mine, theirs in ((a.weights, b.weights), (a.optimizer, b.optimizer)):
        assert mine.keys() == theirs.keys()
        for name in mine if mine is a.weights or to < 1e-6 else ():  # 16 bits round a whole batch otherwise than its parts
            torch.testing.assert_close(theirs[name], mine[name], rtol=to, atol=to, msg=lambda m, n=name: f"{what} {n}: {m}")


TEXT = [
    *(w for w in RUN if not w.startswith("data")), "data=stdlib", "data.length=32", "data.max_files=20", "data.test_samples=8",
    "loss=next_token", "model=gpt", "model.width=32", "model.depth=4", "model.heads=2",
]  # fmt: skip
RESNET = ["model=resnet9", "model.width=8"]
STEPS = ["batch=accumulate", "batch.accumulation_steps=4", "optimizer=sgd", "optimizer.lr=0.01"]
MLP = [
    "model=mlp", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.momentum=0.0", "optimizer.nesterov=false",
    "optimizer.weight_decay=0.0", "batch.global_batch=12", "data.drop_last=true", "updates=3",
]  # fmt: skip
TAIL = [*MLP, "data.drop_last=false", "updates=null"]
THIRDS = ["batch=accumulate", "batch.accumulation_steps=3"]
MIXED = [*MLP, "augment=[cutmix,mixup]", "augment.mixup.alpha=1.0", "data.samples=30", "batch.global_batch=6", "updates=6"]
HALVES = [*VIT, "batch=accumulate", "batch.accumulation_steps=2"]
# The loss weighs its classes, so that the parts of an update count differently.
WEIGHED = ["model=mlp", "model.hidden=[8]", "batch.global_batch=12", "updates=4", "loss.class_weights=[1,2,1,2]"]
CLOSURES = {
    "lbfgs": [*WEIGHED, "optimizer=lbfgs", "optimizer.lr=0.5", "optimizer.max_iter=4"],
    "sam": [*WEIGHED, "optimizer=sam", "optimizer.lr=0.1", "optimizer.rho=0.1"],
}
# The mean is over all tokens of an update, of which ranks and micro-batches have unlike numbers.
OF_TOKENS = [*TEXT, "model.depth=1", "optimizer=sgd", "optimizer.lr=0.05", "batch.tokens=300", "updates=4"]
IN_PLACE = ["model=own", "model.target=double_nets.overwriting", "trust=[double_nets]", "optimizer=sgd", "optimizer.lr=0.01"]
EXACT = SETTINGS["all that must be exact"]
QUICK = [*EXACT, "model.kwargs={depth: 2}", "updates=4"]
FROZEN = [*EXACT, "model.freeze=[patch_embed, pos_embed, blocks.0.attn, blocks.3, '*.norm1']"]
LATER = "model.unfreeze={blocks.3: 2, blocks.0: 4}"  # with ddp, which then looks for unused parameters in every forward
CONVOLUTIONS = [*RESNET, *STEPS, "data.drop_last=true", "updates=3"]  # the same pooling in three places, BatchNorm


class Case(NamedTuple):
    """A run in one process, one under a strategy, and how close they come to each other."""

    one: list[str]
    many: list[str]
    to: float
    name: str
    short: bool  # it is in the normal suite


def case(words: list[str], strategy: str, to: float, *more: str, short: bool = False, beside: list[str] | None = None) -> Case:
    """A run of these words in one process (or with those `beside`), and one under a strategy, with more of its words."""
    # Sharing out a stage's weights needs all updates to be equal. Recomputation and dp exclude each other.
    alike = ["data.drop_last=true", "epochs=3"] if "parallel.shard_stages=true" in STRATEGIES[strategy] else []
    many = [word for word in words if strategy != "dp" or not word.startswith("checkpointing=")]
    name = " ".join([strategy, *words[-2:], *more])
    return Case([*words, *alike, *(beside or [])], [*many, *alike, *STRATEGIES[strategy], *more], to, name, short)


ONE_PROCESS = ("split", "dp")
AS_ONE = [
    *(case(QUICK, strategy, 1e-9, short=True) for strategy in ("ddp", "fsdp", "tensor", "pipeline", *ONE_PROCESS)),
    *(
        case(words, strategy, CLOSE[setting])
        for strategy in STRATEGIES
        for setting, words in SETTINGS.items()
    ),
    case(IN_PLACE, "pipeline", 1e-9, short=True),
    case([*FROZEN, LATER], "ddp", 1e-9, "parallel.find_unused_parameters=true", short=True),
    case([*FROZEN, LATER], "dp", 1e-9),
    *(case(FROZEN, strategy, 1e-9) for strategy in ("fsdp", "tensor", "pipeline")),
    case([*TAIL, "data.samples=25"], "ddp", 1e-4, *THIRDS, short=True),  # a tail of 1, fewer than ranks
    case([*TAIL, "data.samples=53"], "ddp", 1e-4, *THIRDS),
    case(MIXED, "ddp", 1e-4, short=True),
    case(MIXED, "ddp", 1e-4, *THIRDS),
    *(case([*MLP, *BITES[kind]], "ddp", 1e-4, short=kind == "agc") for kind in BITES),
    case([*MLP, "precision=bf16_pure"], "ddp", 2e-2, short=True),  # all that differs is the order of sums, in 16 bits
    case([*MLP, "precision=bf16_pure", "precision.master=stochastic"], "ddp", 2e-2),
    *(case(words, "ddp", 1e-4, *THIRDS, short=True) for words in CLOSURES.values()),
    case(OF_TOKENS, "ddp", 1e-4, *HALVES[-2:], short=True),
    case(CONVOLUTIONS, "split", 1e-4, short=True),
    case(CONVOLUTIONS, "pipeline", 1e-4, "surgery=[channels_last]"),
    case(CONVOLUTIONS, "pipeline", 1e-4, "parallel.schedule=interleaved"),
    # Ranks have statistics of their own, in shards as with ddp. Weights in another order are summed in another order.
    case([*CONVOLUTIONS, "precision=bf16"], "fsdp", 2e-2, beside=["parallel=ddp"]),
    case([*CONVOLUTIONS, "surgery=[channels_last]"], "fsdp", 2e-3, beside=["parallel=ddp"]),
    case([*CONVOLUTIONS, "precision=fp32"], "fsdp", 1e-4, beside=["parallel=ddp"]),
    *(
        case([*TEXT, *STEPS, "batch.accumulation_steps=2", "clip=norm", "updates=4"], strategy, 1e-4)
        for strategy in ("pipeline", "fsdp", "tensor", "tensor × fsdp")
    ),
    *(
        case([*TEXT, *STEPS, "batch.accumulation_steps=2", "updates=4"], strategy, 1e-4, "loss.chunks=3", short=short)
        for strategy, short in (("ddp", True), ("fsdp", True), ("tensor", False))
    ),
    case([*TEXT, "compile=inductor", "updates=4"], "ddp", 1e-4, "loss.chunks=3"),
    *(case([*HALVES, "compile=regional", "compile.block=Block"], s, 1e-4) for s in ("ddp", "fsdp", "tensor", "pipeline")),
    *(case([*HALVES, "compile=inductor"], strategy, 1e-4) for strategy in ("ddp", "fsdp", "tensor")),
]  # fmt: skip
IN_RANKS = [each for each in AS_ONE if each.short and each.name.partition(" ")[0] not in ONE_PROCESS]


@pytest.mark.parametrize(
    ("one", "many", "to"),
    [
        pytest.param(*each[:3], id=each.name, marks=[] if each.short and each not in IN_RANKS else pytest.mark.slow)
        for each in AS_ONE
    ],
)
def test_several_devices_equal_one_process(done, one, many, to):
    equal(of_files(done(*one)), of_files(done(*many)), to)


def test_two_ranks_equal_one_process(ranks, make):
    """The short form of the above: two ranks that have met train all of the runs, one after the other."""

    def work(world: World) -> bytes:
        file = io.BytesIO()
        torch.save([of_trainer(make(*whole(each.many), "saving=none", world=world)) for each in IN_RANKS], file)
        return file.getvalue()

    first, _ = ranks(work)
    alone = cache(lambda *words: of_trainer(make(*whole(words), "saving=none")))
    for each, together in zip(IN_RANKS, torch.load(io.BytesIO(first), weights_only=False), strict=True):
        equal(alone(*each.one), together, each.to, each.name)


@pytest.mark.parametrize(("how", "to"), [("bf16", 2e-2), ("fp16", 5e-3), ("powersgd", 0.3)])
@pytest.mark.slow
def test_gradients_that_travel_in_fewer_bits(done, how, to):
    """As good as whole ones, and not the same: they did travel so."""
    words = [*VIT, "optimizer=sgd", "optimizer.lr=0.05", "parallel=ddp"]
    whole, fewer = of_files(done(*words)), of_files(done(*words, f"parallel.compress={how}"))
    assert fewer.losses == pytest.approx(whole.losses, rel=to)
    assert any(not torch.equal(fewer.weights[name], weight) for name, weight in whole.weights.items())


# --- checkpoints: whole or in parts, from one strategy to another ---

SHARDED = ["saving.sharded=true"]
CHAINS = {
    "at once": (["ddp", "one process", "fsdp", "tensor", "pipeline × tensor", "ddp"], []),
    "beside the training": (["ddp", "one process", "fsdp", "tensor", "pipeline × tensor", "ddp"], ["saving.asynchronous=true"]),
    # tests/parallel/test_whole_layers.py has each of them by itself
    "parts": (["pipeline", "tensor", "fsdp", "tensor × fsdp", "pipeline × tensor", "one process"], SHARDED),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.slow  # the next test reads the parts of one strategy in another
def test_a_run_goes_on_under_any_other_strategy(done, tmp_path, chain):
    """Six updates, under one strategy after the other, are the six of one process; so is what is exported."""
    (strategies, kept), alone, words = CHAINS[chain], of_files(done(*EXACT)), [*RUN, *EXACT, f"output_dir={tmp_path}"]
    for updates, strategy in enumerate(strategies, 1):
        if strategy == "one process" and kept is SHARDED:
            kept = ["saving.sharded=false"]
        of_strategy = STRATEGIES.get(strategy, ["parallel=single"])
        result = run_to_end([*words, *of_strategy, *kept, f"updates={updates}"], updates=updates)
        words = [f"resume={result.run_dir}", "resume_changed=true"]
        assert main.main(["export", str(result.run_dir), str(tmp_path / "plain.safetensors")]) == 0
        assert safetensors.torch.load_file(tmp_path / "plain.safetensors").keys() == alone.weights.keys()
    equal(alone, of_files(result), 1e-9)


def test_every_rank_writes_its_part_and_any_strategy_reads_them(done, tmp_path):
    alone, words = of_files(done(*QUICK)), [*RUN, *QUICK]
    sharded = ["saving.sharded=true", "saving.asynchronous=true"]
    first = run_to_end([*words, *STRATEGIES["fsdp"], *sharded, "updates=2", f"output_dir={tmp_path}"])
    saved = Path(first.run_dir) / "checkpoints" / "2"
    assert {f.name for f in saved.iterdir()} == {"__0_0.distcp", "__1_0.distcp", "pieces.json", "state.pt", "manifest.json"}
    sizes = [(saved / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25  # neither has the whole
    assert main.main(["export", str(first.run_dir), str(tmp_path / "plain.safetensors")]) == 0
    plain = safetensors.torch.load_file(tmp_path / "plain.safetensors")
    assert {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in alone.weights.items()}
    go_on = ["resume_changed=true", f"resume={first.run_dir}"]
    run_to_end([*go_on, *STRATEGIES["pipeline"], "updates=3"], updates=3)
    result = drivetrain.train([*go_on, "parallel=single", "saving.sharded=false", "updates=4"])
    equal(alone, of_files(result), 1e-9)


def test_export(done, tmp_path, says):
    """The newest, the best, a certain update, the average; what is not there is refused."""
    run = done(*QUICK)
    for word, update in ((None, 4), ("update=best", int(run.judged("best")["update"])), ("update=4", 4)):
        to = tmp_path / f"{word}.safetensors"
        assert f"of update {update}:" in says("export", run.run_dir, to, "average=false", *([word] if word else []))
        weights, state = checkpoint_io.load(run.run_dir / "checkpoints" / str(update))
        torch.testing.assert_close(safetensors.torch.load_file(to), weights, rtol=0, atol=0)
    assert main.main(["export", str(run.run_dir), str(tmp_path / "average.safetensors")]) == 0
    average = safetensors.torch.load_file(tmp_path / "average.safetensors")
    torch.testing.assert_close(average["head.weight"], state["ema"]["tensors"]["head.weight"], rtol=0, atol=0)
    for words in ([str(tmp_path)], [str(run.run_dir), "update=99"], [str(run.run_dir), "epoch=3"], ["a", "b", "c"]):
        assert main.main(["export", *words]) == 2


@pytest.mark.parametrize(("norm", "dtype"), [(torch.nn.BatchNorm1d, None), (torch.nn.LayerNorm, "bfloat16")])
def test_a_network_with_batch_norms_is_gathered_in_float32(monkeypatch, norm, dtype):
    """All of its blocks are, also those without one: their statistics are of float32, and so is what they are computed of."""
    seen = []
    monkeypatch.setattr(fsdp, "fully_shard_block", lambda block, mesh, dtype, **_: seen.append(dtype))
    blocks = [torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), norm(4))]
    fsdp.fully_shard_blocks(torch.nn.Sequential(*blocks), blocks, None, "bfloat16")
    assert seen == [dtype] * 3


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "split", "dp"])
def test_digits_to_the_same_accuracy(tmp_path, strategy):
    words = ["precision=bf16", "batch=accumulate", f"output_dir={tmp_path}"]
    one, many = run_to_end(words), run_to_end([*words, *STRATEGIES[strategy]])
    accuracy = one.judged("final")["accuracy"]
    two_errors = 2 * (2 * accuracy * (1 - accuracy) / 288) ** 0.5  # of a difference, on so many validation samples
    assert many.judged("final")["accuracy"] == pytest.approx(accuracy, abs=two_errors)
