"""Compiling: what is handed to torch, that names stay plain, and that results stay what they were."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from drivetrain.compile.kernel_cache import drop_broken


@pytest.fixture
def eager_backend(monkeypatch):
    """torch.compile with a backend that traces as inductor does and runs what it traced as it is. The calls it got."""
    calls, original = [], torch.compile

    def compile_(model, **knobs):
        calls.append(knobs)
        return original(model, backend="aot_eager", dynamic=knobs["dynamic"], fullgraph=knobs["fullgraph"])

    monkeypatch.setattr("drivetrain.core.lazy.torch.compile", compile_)  # the module that drivetrain's groups see
    yield calls
    torch._dynamo.reset()


def test_the_knobs_reach_torch(make, eager_backend):
    make("compile=inductor", "compile.mode=max-autotune", "compile.dynamic=false", "compile.fullgraph=true")
    assert eager_backend == [{"mode": "max-autotune", "dynamic": False, "fullgraph": True}]


@pytest.mark.slow
def test_a_traced_step_equals_the_plain_one_and_saves_plain_names(train, make, eager_backend):
    words = ["model=resnet9", "model.width=8", "checkpointing=blocks", "updates=3", "optimizer.lr=0.01"]
    plain, traced = train(*words), train(*words, "compile=inductor", "compile.fullgraph=true")
    assert (plain.status, traced.status) == ("completed", "completed"), traced.error
    assert len(eager_backend) == 1
    a, b = (safetensors.torch.load_file(r.run_dir / "checkpoints/3/model.safetensors") for r in (plain, traced))
    start = make(*words).model.state_dict()
    assert a.keys() == b.keys() == start.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-4, atol=1e-5)
    assert not torch.equal(a["head.weight"], start["head.weight"])
    assert b["features.3.body.0.1.num_batches_tracked"] == 3  # once a batch: recomputation does not count
    assert plain.compile_s is None
    assert traced.compile_s is not None


def test_one_graph_serves_the_whole_run(make, eager_backend):
    """Shapes hold still while training, and evaluation does not go through it: nothing is compiled again."""
    import torch._dynamo.utils as dynamo

    dynamo.counters.clear()
    make("compile=inductor", "updates=8", "epochs=4", "scheduler=cosine", "ema=ema").fit()
    assert dynamo.counters["stats"]["unique_graphs"] == 1
    assert not dynamo.counters["graph_break"]


def test_none_is_the_model_itself(make):
    trainer = make()
    assert trainer.step.forward is trainer.model


def test_what_cannot_be_is_refused(problems, monkeypatch):
    assert any(
        "compile=inductor and debug=anomaly exclude each other" in p for p in problems("compile=inductor", "debug=anomaly")
    )
    assert any("compile.mode=fastest" in p for p in problems("compile=inductor", "compile.mode=fastest"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert any("compile=inductor needs a C++ compiler" in p for p in problems("compile=inductor"))


def test_what_a_killed_linker_left_is_not_loaded(tmp_path):
    """A truncated shared object in the kept cache would fail every later run; whole ones and fresh ones stay."""
    whole = Path(torch._C.__file__).read_bytes()
    left = {"whole": whole, "cut": whole[:1000], "head": whole[:40], "blank": bytes(len(whole)), "empty": b"", "fresh": b""}
    (tmp_path / "kernels").mkdir()
    for name, content in left.items():
        file = tmp_path / f"kernels/{name}.so"
        file.write_bytes(content)
        os.utime(file, None if name == "fresh" else (0, 0))
    assert {file.stem for file in drop_broken(tmp_path)} == {"cut", "head", "blank", "empty"}
    assert {file.stem for file in tmp_path.rglob("*.so")} == {"whole", "fresh"}


@pytest.mark.slow
def test_a_cache_full_of_truncated_kernels_is_built_anew(tiny, tmp_path):
    run = [sys.executable, "-m", "drivetrain", "train", *tiny("compile=inductor", f"compile.cache_dir={tmp_path}/cache")]
    subprocess.run(run, check=True)
    kernels = list((tmp_path / "cache").rglob("*.so"))
    assert kernels
    for file in kernels:
        file.write_bytes(file.read_bytes()[:200])
        os.utime(file, (0, 0))
    subprocess.run(run, check=True)
