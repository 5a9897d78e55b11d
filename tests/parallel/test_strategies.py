"""Every strategy of several processes against one process with the same global batch: losses, weights, states, evaluations."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import drivetrain
from drivetrain.cli import main
from drivetrain.parallel import fsdp
from tests.clip.test_clip import BITES
from tests.support import command

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


class Done:
    """The files and the result that a run left."""

    def __init__(self, result: Any) -> None:
        assert result.status == "completed", result.error
        self.result, self.run_dir = result, Path(result.run_dir)
        checkpoint = self.run_dir / "checkpoints" / str(result.updates)
        self.weights = safetensors.torch.load_file(checkpoint / "model.safetensors")
        self.state = torch.load(checkpoint / "state.pt", weights_only=True)
        self.losses = [
            record["loss"]
            for record in map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
            if record["event"] == "train"
        ]


@pytest.fixture(scope="module", autouse=True)
def _nets():
    """double_nets can be imported, here and by the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(command.HERE)
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """`done(words)`: a run of them, run once for all tests."""
    runs: dict[tuple[str, ...], Done] = {}

    def run(*words: str) -> Done:
        base = [] if "loss=next_token" in words else RUN
        if words not in runs:
            runs[words] = Done(drivetrain.train([*base, *words, f"output_dir={tmp_path_factory.mktemp('runs')}"]))
        return runs[words]

    return run


def equal(a: Done, b: Done, to: float) -> None:
    assert a.weights.keys() == b.weights.keys()
    for name in a.weights:
        torch.testing.assert_close(b.weights[name], a.weights[name], rtol=to, atol=to, msg=lambda m, n=name: f"{n}: {m}")
    assert len(a.losses) == len(b.losses) == a.result.updates
    assert b.losses == pytest.approx(a.losses, rel=max(to, 1e-6))  # summed in float32
    for name, value in a.result.judged("final").items():
        assert b.result.judged("final")[name] == pytest.approx(value, rel=max(to, 1e-6), abs=to)
    if to > 1e-6:  # 16 bits round a whole batch otherwise than its parts
        return
    mine, theirs = (by_name(done.state["optimizer"]) for done in (a, b))
    assert mine.keys() == theirs.keys()
    for name, of_weight in mine.items():
        for key, value in of_weight.items():
            torch.testing.assert_close(theirs[name][key], value, rtol=to, atol=to, msg=lambda m, n=f"{name} {key}": f"{n}: {m}")


def by_name(optimizer: dict) -> dict:
    names = {i: n for g in optimizer["param_groups"] for i, n in zip(g["params"], g["param_names"], strict=True)}
    return {names[i]: state for i, state in optimizer["state"].items()}


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
IN_PLACE = ["model=own", "model.target=double_nets.overwriting", "trust=[double_nets]", "optimizer=sgd", "optimizer.lr=0.01"]
EXACT = SETTINGS["all that must be exact"]
FROZEN = [*EXACT, "model.freeze=[patch_embed, pos_embed, blocks.0.attn, blocks.3, '*.norm1']"]
LATER = "model.unfreeze={blocks.3: 2, blocks.0: 4}"  # with ddp, which then looks for unused parameters in every forward
CONVOLUTIONS = [*RESNET, *STEPS, "data.drop_last=true", "updates=3"]  # the same pooling in three places, BatchNorm


def case(words: list[str], strategy: str, to: float, *more: str, slow: bool = True, beside: list[str] | None = None) -> Any:
    """A run of these words in one process (or with those `beside`), and one under a strategy, with more of its words."""
    # Sharing out a stage's weights needs all updates to be equal. Recomputation and dp exclude each other.
    alike = ["data.drop_last=true", "epochs=3"] if "parallel.shard_stages=true" in STRATEGIES[strategy] else []
    many = [word for word in words if strategy != "dp" or not word.startswith("checkpointing=")]
    marks = [pytest.mark.slow] if slow else []
    name = " ".join([strategy, *words[-2:], *more])
    return pytest.param(
        [*words, *alike, *(beside or [])], [*many, *alike, *STRATEGIES[strategy], *more], to, marks=marks, id=name
    )


SHORT = {"ddp", "fsdp", "tensor", "pipeline", "split", "dp"}
AS_ONE = [
    *(
        case(words, strategy, CLOSE[setting], slow=words is not EXACT or strategy not in SHORT)
        for strategy in STRATEGIES
        for setting, words in SETTINGS.items()
    ),
    case(IN_PLACE, "pipeline", 1e-9, slow=False),
    case([*FROZEN, LATER], "ddp", 1e-9, "parallel.find_unused_parameters=true", slow=False),
    case([*FROZEN, LATER], "dp", 1e-9),
    *(case(FROZEN, strategy, 1e-9) for strategy in ("fsdp", "tensor", "pipeline")),
    case([*TAIL, "data.samples=25"], "ddp", 1e-4, *THIRDS, slow=False),  # a tail of 1, fewer than ranks
    case([*TAIL, "data.samples=53"], "ddp", 1e-4, *THIRDS),
    case(MIXED, "ddp", 1e-4, slow=False),
    case(MIXED, "ddp", 1e-4, *THIRDS),
    *(case([*MLP, *BITES[kind]], "ddp", 1e-4, slow=kind != "agc") for kind in BITES),
    case([*MLP, "precision=bf16_pure"], "ddp", 2e-2, slow=False),  # all that differs is the order of sums, in 16 bits
    case([*MLP, "precision=bf16_pure", "precision.master=stochastic"], "ddp", 2e-2),
    case(CONVOLUTIONS, "split", 1e-4, slow=False),
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
    *(case([*HALVES, "compile=regional", "compile.block=Block"], s, 1e-4) for s in ("ddp", "fsdp", "tensor", "pipeline")),
    *(case([*HALVES, "compile=inductor"], strategy, 1e-4) for strategy in ("ddp", "fsdp", "tensor")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "many", "to"), AS_ONE)
def test_several_devices_equal_one_process(done, one, many, to):
    alone, together = done(*one), done(*many)
    equal(alone, together, to)
    assert together.losses != alone.losses[:1] * len(alone.losses)  # it has learnt something


@pytest.mark.parametrize(
    ("how", "to"),
    [("bf16", 2e-2), *(pytest.param(*both, marks=pytest.mark.slow) for both in (("fp16", 5e-3), ("powersgd", 0.3)))],
)
@pytest.mark.slow
def test_gradients_that_travel_in_fewer_bits(done, how, to):
    """As good as whole ones, and not the same: they did travel so."""
    words = [*VIT, "optimizer=sgd", "optimizer.lr=0.05", "parallel=ddp"]
    whole, fewer = done(*words), done(*words, f"parallel.compress={how}")
    assert fewer.losses == pytest.approx(whole.losses, rel=to)
    assert any(not torch.equal(fewer.weights[name], weight) for name, weight in whole.weights.items())


# --- checkpoints: whole or in parts, from one strategy to another ---

CHAIN = [("ddp", 1), ("one process", 2), ("fsdp", 3), ("tensor", 4), ("pipeline × tensor", 6)]  # until which update


@pytest.mark.parametrize(
    "kept",
    [
        pytest.param([], id="at once", marks=pytest.mark.slow),
        pytest.param(["saving.asynchronous=true"], id="beside the training"),
    ],
)
@pytest.mark.slow  # the next test reads the parts of one strategy in another
def test_a_run_goes_on_under_any_other_strategy(done, tmp_path, kept):
    """Six updates, under one strategy after the other, are the six of one process."""
    whole = done(*EXACT)
    run_dir = None
    for strategy, updates in CHAIN:
        words = STRATEGIES.get(strategy, ["parallel=single"])
        first = [*RUN, *EXACT, f"output_dir={tmp_path}"] if run_dir is None else [f"resume={run_dir}", "resume_changed=true"]
        result = drivetrain.train([*[w for w in first if not w.startswith("updates=")], *words, *kept, f"updates={updates}"])
        run_dir = result.run_dir
        assert (result.status, result.updates) == ("completed", updates), result.error
    equal(whole, Done(result), 1e-9)


@pytest.mark.slow  # tests/parallel/test_saved_parts.py has each of them by itself
def test_a_run_goes_on_from_the_parts_of_any_other_strategy(done, tmp_path):
    """Six updates, each strategy from the parts of the one before, are the six of one process; so is what is exported."""
    whole, run_dir = done(*EXACT), None
    for updates, strategy in enumerate(("pipeline", "tensor", "fsdp", "tensor × fsdp", "pipeline × tensor"), 1):
        first = [*(w for w in [*RUN, *EXACT] if not w.startswith("updates=")), f"output_dir={tmp_path}", "saving.sharded=true"]
        words = first if run_dir is None else [f"resume={run_dir}", "resume_changed=true"]
        result = drivetrain.train([*words, *STRATEGIES[strategy], f"updates={updates}"])
        run_dir = result.run_dir
        assert (result.status, result.updates) == ("completed", updates), (strategy, result.error)
        assert main.main(["export", str(run_dir), str(tmp_path / "plain.safetensors")]) == 0
        assert safetensors.torch.load_file(tmp_path / "plain.safetensors").keys() == whole.weights.keys()
    words = [f"resume={run_dir}", "resume_changed=true", "parallel=single", "saving.sharded=false", "updates=6"]
    equal(whole, Done(drivetrain.train(words)), 1e-9)


def test_every_rank_writes_its_part_and_any_strategy_reads_them(done, tmp_path):
    whole = done(*EXACT)
    words = [w for w in [*RUN, *EXACT] if not w.startswith("updates=")]
    sharded = ["saving.sharded=true", "saving.asynchronous=true"]
    first = drivetrain.train([*words, *STRATEGIES["fsdp"], *sharded, "updates=2", f"output_dir={tmp_path}"])
    assert first.status == "completed", first.error
    saved = Path(first.run_dir) / "checkpoints" / "2"
    assert {f.name for f in saved.iterdir()} == {"__0_0.distcp", "__1_0.distcp", "pieces.json", "state.pt", "manifest.json"}
    sizes = [(saved / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert 0.8 < sizes[0] / sizes[1] < 1.25  # neither has the whole
    assert main.main(["export", str(first.run_dir), str(tmp_path / "plain.safetensors")]) == 0
    plain = safetensors.torch.load_file(tmp_path / "plain.safetensors")
    assert {n: t.shape for n, t in plain.items()} == {n: t.shape for n, t in whole.weights.items()}
    go_on = ["resume_changed=true", f"resume={first.run_dir}"]
    result = drivetrain.train([*go_on, *STRATEGIES["ddp"], "updates=4"])
    assert (result.status, result.updates) == ("completed", 4), result.error
    result = drivetrain.train([*go_on, "parallel=single", "saving.sharded=false", "updates=6"])
    equal(whole, Done(result), 1e-9)


def test_export(done, tmp_path, capsys):
    """The newest, the best, a certain update, the average; what is not there is refused."""
    run = done(*EXACT)
    for word, update in ((None, "6"), ("update=best", str(int(run.result.judged("best")["update"]))), ("update=6", "6")):
        to = tmp_path / f"{word}.safetensors"
        assert main.main(["export", str(run.run_dir), str(to), *([word] if word else [])]) == 0
        assert f"of update {update}:" in capsys.readouterr().out
        saved = safetensors.torch.load_file(run.run_dir / "checkpoints" / update / "model.safetensors")
        torch.testing.assert_close(safetensors.torch.load_file(to), saved, rtol=0, atol=0)
    assert main.main(["export", str(run.run_dir), str(tmp_path / "average"), "average=true"]) == 0
    average = safetensors.torch.load_file(tmp_path / "average")
    torch.testing.assert_close(average["head.weight"], run.state["ema"]["tensors"]["head.weight"], rtol=0, atol=0)
    for words in ([str(tmp_path)], [str(run.run_dir), "update=99"], [str(run.run_dir), "epoch=3"], ["a", "b", "c"]):
        assert main.main(["export", *words]) == 2


# --- a rank that has more to do ---


@pytest.mark.slow  # it sleeps; tests/parallel/test_two_ranks.py has the figures of ranks whose clock is set
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline", "pipeline × tensor"])
def test_the_slowest_rank_is_named_in_the_metrics(strategy, tmp_path, monkeypatch, capfd):
    slow = "3" if "×" in strategy else "1"
    monkeypatch.setenv("SLOW_RANK", slow)
    words = [w for w in RUN if not w.startswith("updates=")]
    own = ["model=own", "model.target=double_nets.slow_on_a_rank", "trust=[double_nets]"]
    result = drivetrain.train([*words, *own, *STRATEGIES[strategy], "updates=6", f"output_dir={tmp_path}"])
    assert result.status == "completed", result.error
    lines = map(json.loads, (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines())
    told = [(r["slowest_rank"], r["rank_work_excess"]) for r in lines if r["event"] == "train"][1:]
    # 300 to 600 ms against a few: a busy machine may delay another rank as long once, not most of the time.
    assert statistics.mode(rank for rank, _ in told) == int(slow), told
    assert statistics.median(excess for _, excess in told) > 0.05, told
    assert f"% waits for rank {slow}" in capfd.readouterr().out


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
    one, many = drivetrain.train(words), drivetrain.train([*words, *STRATEGIES[strategy]])
    assert many.status == "completed", many.error
    assert many.judged("final")["accuracy"] == pytest.approx(one.judged("final")["accuracy"], abs=0.0051)
