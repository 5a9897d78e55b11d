"""Runs on dicts and tuples keep every promise of a run on tensors."""

import pytest
import torch

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.step.model_call import ModelCall
from drivetrain.core.world import World
from drivetrain.engine import flops
from tests.compile.test_options import compilations  # noqa: F401 (fixture)
from tests.support import command, slow

OWN = ["data=own", "trust=[tree_sets]", "model=own", "optimizer=adamw", "optimizer.eps=1e-3", "optimizer.lr=0.01", "updates=5",
       "epochs=2", "data.drop_last=false"]  # fmt: skip
RUNS = {
    "dicts": ["data.target=tree_sets.Dicts", "model.target=tree_sets.Net"],
    "tuples": ["data.target=tree_sets.Tuples", "model.target=tree_sets.Net"],
    "one argument": ["data.target=tree_sets.Tuples", "model.target=tree_sets.Together", "forward_input=one"],
    "positions": ["data.target=tree_sets.Dicts", "model.target=tree_sets.Net", "forward_input=positions"],
    "padded": ["data.target=tree_sets.Words", "model.target=tree_sets.Reader"],
    "buckets": ["data.target=tree_sets.Words", "model.target=tree_sets.Reader", "batch=bucketed", "batch.pad_to=4"],
    "tags": ["data.target=tree_sets.Tagged", "model.target=tree_sets.Tagger", "loss=next_token"],
}
ACCUMULATED = {name: ["batch.accumulation_steps=3", *([] if "bucketed" in str(words) else ["batch=accumulate"])]
               for name, words in RUNS.items()}  # fmt: skip
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _sets(monkeypatch):
    monkeypatch.syspath_prepend(command.HERE)


def close(a, b) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", RUNS)
def test_accumulation_equals_the_big_batch(train, make, name):
    whole, parts = (train(*OWN, *RUNS[name], *words) for words in ([], ACCUMULATED[name]))
    close(command.tensors(whole), command.tensors(parts))
    assert whole.judged("final") == pytest.approx(parts.judged("final"), rel=1e-3)
    start = make(*OWN, *RUNS[name]).model.state_dict()
    assert not any(torch.equal(start[key], value) for key, value in command.tensors(whole).items())


def test_token_numbers_of_ones_own_train_a_shipped_transformer(train):
    """Padding on the right is nothing to a network that looks back: micro-batches with other padding give the same."""
    words = [w for w in OWN if w != "model=own"] + ["data.target=tree_sets.Text", "model=gpt", "model.width=8", "model.heads=2"]
    whole, parts = (train(*words, "model.depth=1", "loss=next_token", *w) for w in ([], ACCUMULATED["dicts"]))
    close(command.tensors(whole), command.tensors(parts))


@pytest.mark.parametrize("name", slow.but("buckets".__eq__, ["dicts", "buckets", "tuples", "tags"]))
def test_two_ranks_equal_one_process(train, name):
    one, two = train(*OWN, *RUNS[name]), train(*OWN, *RUNS[name], *ACCUMULATED[name], "parallel=ddp")
    assert two.world_size == 2
    close(command.tensors(one), command.tensors(two))
    assert two.judged("final") == pytest.approx(one.judged("final"), rel=1e-3)


@pytest.mark.slow
def test_sharded_ranks_equal_one_process(train):
    one, two = train(*OWN, *RUNS["dicts"]), train(*OWN, *RUNS["dicts"], "parallel=fsdp")
    close(command.tensors(one), command.tensors(two))


@pytest.mark.parametrize("name", ["dicts", "buckets"])
def test_a_resumed_run_is_the_uninterrupted_one(train, stop_at, name):
    words = [*OWN, *RUNS[name], "loader=threads", "loader.num_threads=2"]
    whole = train(*words)
    stop_at(3)
    stopped = train(*words, ends="interrupted")
    stop_at(None)
    resumed = drivetrain.train([f"resume={stopped.run_dir}"])
    assert command.weights(resumed.run_dir) == command.weights(whole.run_dir)
    assert resumed.metrics == whole.metrics


@pytest.mark.parametrize("name", ["dicts", *(pytest.param(name, marks=pytest.mark.slow) for name in ("one argument", "buckets"))])
@pytest.mark.parametrize("option", slow.but("step".__eq__, ["inductor", "step"]))
def test_compiled_and_traced_runs_equal_the_plain_one(train, compilations, recorded, option, name, caplog):  # noqa: F811
    words = ["batch.pad_to=16"] if name == "buckets" else []
    plain, compiled = train(*OWN, *RUNS[name], *words), train(*OWN, *RUNS[name], *words, f"compile={option}")
    close(command.tensors(plain), command.tensors(compiled))
    assert compilations or option == "step"
    assert "cannot be one graph" not in caplog.text
    assert recorded or option == "inductor"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["inductor", "step"])
def test_compilers_train_the_same(train, option):
    plain, compiled = train(*OWN, *RUNS["dicts"]), train(*OWN, *RUNS["dicts"], f"compile={option}")
    close(command.tensors(plain), command.tensors(compiled))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dicts", ["precision=bf16_pure", "checkpointing=blocks", "checkpointing.block=Sequential", "batch.preallocate=true"]),
        ("one argument", ["precision=bf16_pure"]),
        ("dicts", ["precision=bf16", "debug=overfit", "debug.updates=2"]),
        ("tuples", ["precision=amp", "ema=ema"]),
        ("dicts", ["compile=jit"]),
        ("tuples", ["compile=jit"]),
        ("dicts", ["parallel=split", "parallel.devices=[cpu,cpu]"]),
        ("dicts", ["debug=gradcheck"]),
        ("one argument", ["debug=gradcheck"]),
        ("dicts", ["surgery=[channels_last]", "model.target=tree_sets.Images"]),
    ],
    ids=str,
)
def test_other_options_take_them_too(train, name, words):
    words = [*(w for w in RUNS[name] if w.partition("=")[0] not in {w.partition("=")[0] for w in words}), *words]
    train(*OWN, *words)


def test_the_model_is_called_alike_everywhere(make):
    trainer = make(*OWN, *RUNS["dicts"])
    context = make.contexts[-1]
    assert context.example.keys() == {"image", "person"}
    assert context.model_call == ModelCall("keywords")
    counted = flops.count(trainer.model, context.example)
    assert counted.per_sample == 3 * 2 * (192 * 8 + 3 * 8 + 8 * 8 + 8 * 8 + 8 * 4) - 2 * (192 * 8 + 3 * 8)


def test_a_plain_tensor_costs_no_call():
    forward = object()
    assert ModelCall("one").taking_batches(forward) is forward
    tensor = torch.zeros(2)
    assert ModelCall("one").arguments(tensor) is tensor


@pytest.mark.parametrize(
    ("setting", "x", "says"),
    [
        ("keywords", torch.zeros(2), "forward_input=keywords, but the inputs of a sample are one tensor: set forward_input=auto"),
        ("keywords", (torch.zeros(2),), "are a tuple"),
        ("positions", torch.zeros(2), "are one tensor"),
    ],
)
def test_a_call_that_cannot_be_is_refused(setting, x, says):
    with pytest.raises(UserError, match=says):
        ModelCall.chosen(setting, x)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["data.target=tree_sets.Dicts", "model.target=tree_sets.Reader"],
            r"Reader\.forward cannot take .*image, .*keywords",
        ),
        (["data.target=tree_sets.Dicts", "model=mlp"], "model=mlp takes one tensor, and the inputs of a sample are several"),
        (["data.target=tree_sets.Tuples", "model.target=tree_sets.Net", "augment=[flip_crop]"], "none of them named `image`"),
        (["data.target=tree_sets.Dicts", "model.target=tree_sets.Net", "augment=[mixup]"], "mixes whole samples"),
        (["data.target=tree_sets.Dicts", "model.target=tree_sets.Net", "batch=bucketed"], "sorts by length"),
    ],
)
def test_what_does_not_fit_is_refused(make, words, says):
    own = [w for w in OWN if not (w == "model=own" and "model=mlp" in words)]
    with pytest.raises(UserError, match=says):
        make(*own, *words)


def test_a_pipeline_says_that_it_takes_one_tensor(train):
    with pytest.raises(UserError, match="parallel=pipeline hands one tensor from stage to stage"):
        train(*OWN, *RUNS["dicts"], "parallel=pipeline")


def test_weights_count_samples_where_only_lengths_differ(make):
    """Words have one target each, whatever their length; tags have one for each token."""
    for name, of_tokens in (("buckets", False), ("tags", True)):
        batch = make(*OWN, *RUNS[name], world=World()).batch
        assert batch.lengths is not None
        few = torch.tensor([0, 1, 2])
        assert batch.amount(few) == (int(batch.lengths[few].sum()) if of_tokens else 3)
