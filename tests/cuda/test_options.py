"""Every option of every group trains on a fake device: nothing mixes devices, and no step waits for the device.

The options are those of the catalog, so a new one is tested by being there. They are trained in rows of options of different
groups. Where a row is refused or fails, its halves are trained, down to the option that is to blame.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from drivetrain.core.step.microbatch import Request
from drivetrain.core.world import World
from drivetrain.data import Normalize, Tensors
from drivetrain.loader import Pipeline
from tests.support import command, fake_device, slow
from tests.test_contract import OPTIONS, class_of, ids, in_parts, in_rows, words_of, words_of_row

CLASSES = {option: class_of(option) for option in OPTIONS}
REAL = [option for option in OPTIONS if CLASSES[option].needs_real_tensors]
WAITING = [option for option in OPTIONS if CLASSES[option].step_waits]
SEVERAL_RANKS = [o for o in OPTIONS if getattr(CLASSES[o], "distributed", False) and o not in REAL]  # below
# Metrics: tests/metrics/test_figures.py. Tasks only choose options that are in other rows.
ELSEWHERE = [o for o in OPTIONS if o[0] in ("metrics", "task") and o not in REAL]


ROWS = in_rows((option for option in OPTIONS if option not in (*REAL, *SEVERAL_RANKS, *ELSEWHERE)), WAITING)


def train(fake_run, kind, row):
    """Train a row of options on a kind of fake device. Raises UserError for a refusal."""
    words = [word.replace("[cpu,cpu]", f"['{kind}:0','{kind}:0']") for word in words_of_row(row)]
    words.append("metrics=[]")  # their figures are computed from real values, after the steps
    words += [] if any(word.startswith("saving=") for word in words) else ["saving=none"]
    trainer, device = fake_run(kind, *words)
    assert trainer.progress.updates == trainer.max_updates
    assert {t.device.type for t in (*trainer.model.parameters(), *trainer.model.buffers())} == {kind}
    if row[0] not in WAITING:
        assert not device.waits
    elif kind == "lazy":  # on cuda the backward is only played
        assert device.waits, f"{ids(row)}: its steps do not wait any more: take step_waits away"


def in_short(run):
    """The paths of CUDA for every option; torch's own backward for those that wait and for every sixth row."""
    kind, row = run
    return kind == "cuda" or row[0] in WAITING or ROWS.index(row) % 6 == 0


RUNS = [(kind, row) for row in ROWS for kind in fake_device.KINDS]


@pytest.mark.parametrize(("kind", "row"), slow.but(in_short, RUNS, lambda run: " ".join([run[0], *ids(run[1])])))
def test_options_train_on_a_device_and_their_steps_do_not_wait(fake_run, kind, row):
    """A row of options on a kind of fake device."""
    lacking = list(in_parts(row, partial(train, fake_run, kind)))
    if lacking:
        pytest.skip("trained, but for: " + "; ".join(dict.fromkeys(lacking)))


@pytest.mark.parametrize("option", REAL, ids=ids(REAL))
def test_what_fake_tensors_cannot_stand_for(option):
    """So that the report shows which options are left to a real device, and why."""
    pytest.skip(CLASSES[option].needs_real_tensors)


def test_a_model_of_transformers_trains_in_float8(fake_run):
    """Its libraries ask the device what it can do while they are imported. A lazy device has no autocast for attention."""
    pytest.importorskip("transformers")
    sizes = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, intermediate_size: 32}"
    words = [
        "model=transformers",
        "model.name=llama",
        f"model.config={sizes}",
        "data=stdlib",
        "data.length=16",
        "data.max_files=10",
    ]
    fp8 = ["precision=fp8", "precision.min_features=16", "precision.emulate=true"]
    trainer, device = fake_run("cuda", *words, "data.test_samples=8", "loss=next_token", *fp8)
    assert trainer.progress.updates == trainer.max_updates
    assert not device.waits


def test_every_option_is_in_a_row_or_says_why_not():
    assert sorted([o for row in ROWS for o in row] + REAL + SEVERAL_RANKS + ELSEWHERE) == sorted(OPTIONS)
    assert len(ROWS) < len(OPTIONS) / 3
    assert len(REAL) < len(OPTIONS) / 10


# --- every augmentation works on a fake device, as loader=device uses it: nothing mixes devices, and nothing waits ---


AUGMENTATIONS = {name: CLASSES[group, name] for group, name in OPTIONS if group == "augment"}
IMAGES = {"bytes": torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), "floats": torch.rand(8, 3, 16, 16)}
NORMALIZE = Normalize([127.0] * 3, [70.0] * 3)


def batch_of(device, names, images):
    """A batch that was augmented and normalised on the device: once for the tables that are made once, then watched."""
    steps = tuple(AUGMENTATIONS[name]() for name in names)
    pipeline = Pipeline(Tensors(IMAGES[images], torch.arange(8) % 4), steps, NORMALIZE, seed=0, classes=4)
    mixes = any(step.mixes for step in steps)
    request = Request(0, torch.arange(6), 1.0, mix_with=torch.arange(6) ^ 1 if mixes else None)
    on_device = pipeline.to(device.device)
    for watched in (False, True):
        x, y = (t.to(device.device) for t in pipeline.read(request))
        device.in_step = device.watching = watched
        x, y = on_device.augment(x, y, request)
        x = on_device.normalized(x)
        device.in_step = device.watching = False
    return x, y


@pytest.mark.parametrize("kind", fake_device.KINDS)
@pytest.mark.parametrize("names", [[name] for name in AUGMENTATIONS] + [["flip_crop", "mixup", "cutmix"]], ids=",".join)
def test_it_works_on_a_device_without_waiting(pretend, kind, names):
    with pretend(kind) as device:
        batches = {images: batch_of(device, names, images) for images in IMAGES}
    for images, (x, y) in batches.items():
        assert x.device == y.device == device.device, images
        assert x.dtype == torch.float32, images
        assert len(x) == len(y) == 6
    assert not device.waits


# --- runs on dicts and tuples on a fake device: nothing mixes devices, and no step waits ---


@pytest.mark.parametrize(
    "words",
    [
        ["data.target=tree_sets.Dicts", "model.target=tree_sets.Images", "augment=[flip_crop]", "loader=device",
         "surgery=[channels_last]"],
        ["data.target=tree_sets.Tuples", "model.target=tree_sets.Net", "precision=bf16_pure", "loader=workers"],
        ["data.target=tree_sets.Words", "model.target=tree_sets.Reader", "batch=bucketed", "loader=threads", "ema=ema"],
        ["data.target=tree_sets.Words", "model.target=tree_sets.Reader", "loader=resident"],
    ],
    ids=str,
)  # fmt: skip
def test_they_train_on_a_device_and_their_steps_do_not_wait(fake_run, monkeypatch, words):
    monkeypatch.syspath_prepend(command.HERE)
    trainer, device = fake_run("cuda", "data=own", "trust=[tree_sets]", "model=own", "saving=none", *words)
    assert trainer.progress.updates == 2
    assert {p.device.type for p in trainer.model.parameters()} == {"cuda"}
    assert not device.waits


# --- sharded models on a fake device: one of two ranks, whose collectives return at once ---


VARIANTS = {
    ("parallel", "fsdp"): [
        [],
        ["parallel.replicate=2", "clip=norm", "ema=ema"],
        ["parallel.sync_each_micro=true", "batch=accumulate", "batch.accumulation_steps=2"],
    ],
}


@pytest.mark.parametrize("option", SEVERAL_RANKS, ids=ids(SEVERAL_RANKS))
def test_it_trains_and_its_steps_do_not_wait(fake_run, monkeypatch, option):
    for words in VARIANTS.get(option, [[]]):
        fake_device.pretend_ranks(monkeypatch, "lazy", 2)
        try:
            given = [*words_of(option), "parallel.nproc=2", "saving=none", *words]
            trainer, device = fake_run("lazy", *given, world=World(0, 2, 0, 2))
            assert trainer.progress.updates == 2
            assert not device.waits
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            monkeypatch.undo()
