"""loss.temperature=learned: a weight of the model, which is trained, clamped, averaged, saved and written as CLIP's is."""

import copy
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.nn.functional import cross_entropy, normalize

import drivetrain
from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import MicroBatch
from drivetrain.core.world import World
from drivetrain.launch.job import prepare
from drivetrain.loss.embedding import LOWEST, SCALE
from tests.parallel.conftest import ranks  # noqa: F401 (fixture)
from tests.support.command import ROOT
from tests.support.same_end import resumed
from tests.support.to_end import run_to_end

WORDS = [
    "data=own", "data.target=halves.Halves", "data.targets=pair", "data.validation=null", "data.order=sequential", "model=own",
    "model.target=halves.Both", "model.kwargs={width: 8, size: 6}", "trust=[halves]", "loss=contrastive",
    "loss.temperature=learned", "loss.within_views=false", "optimizer=adam", "optimizer.lr=0.01", "scheduler=constant",
    "batch.global_batch=64", "updates=6", "log_every=1", "runtime.threads=1", "runtime.device=cpu",
]  # fmt: skip
SPLIT = ["batch=accumulate", "batch.accumulation_steps=4"]
HIGHEST = -math.log(LOWEST)


@pytest.fixture(autouse=True)
def _halves(import_from: Callable[[Path], None]) -> None:
    import_from(ROOT / "examples/clip")


def clip(model: torch.nn.Module, batches: Iterator[MicroBatch], first: float, lr: float) -> list[float]:
    """The losses of CLIP's own loop, which clamps after each update. Its scale is the model's parameter."""
    scale = torch.nn.Parameter(torch.tensor(first))
    optimizer, losses = torch.optim.Adam([*model.parameters(), scale], lr), []
    for batch in batches:
        one, two = (normalize(each, dim=1) for each in model(**batch.x))
        scores = scale.exp() * one @ two.T
        right = torch.arange(len(scores))
        loss = (cross_entropy(scores, right) + cross_entropy(scores.T, right)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            scale.clamp_(0, HIGHEST)
        losses.append(loss.item())
    model.register_parameter(SCALE, scale)
    return losses


@pytest.mark.parametrize(
    ("words", "first"),
    [([], None), (SPLIT, None), (SPLIT, HIGHEST + 2), (SPLIT, -1.0)],
    ids=["whole", "four", "too high", "too low"],
)
def test_it_trains_as_clips_own_loop(trainer_of: Callable[..., Any], words: list[str], first: float | None) -> None:
    """Also in four micro-batches, and where the scale would leave its bounds."""
    trainer = trainer_of(prepare([*WORDS, *words]))
    theirs = copy.deepcopy(trainer.model)
    scale = trainer.model.get_parameter(SCALE)
    assert scale.item() == pytest.approx(math.log(1 / 0.07))
    with torch.no_grad():
        scale.fill_(scale if first is None else first)
    begins = min(max(scale.item(), 0.0), HIGHEST)
    del theirs.logit_scale
    whole = trainer_of(prepare(WORDS))
    batches = whole.loader.stream(whole.train_data, whole.requests(), whole.device, whole.memory_format)
    expected = clip(theirs, (next(batches) for _ in range(6)), begins, 0.01)
    trainer.fit()
    losses = trainer.log.writers[0].losses
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in trainer.model.named_parameters():
        torch.testing.assert_close(weight, theirs.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_ranks_train_one_temperature(ranks: Any, trainer_of: Callable[..., Any]) -> None:  # noqa: F811
    """The mean of theirs is one rank's."""

    def trained(world: World) -> dict[str, Any]:
        words = ["parallel=ddp", "parallel.nproc=2"] if world.size > 1 else []
        trainer = trainer_of(prepare([*WORDS, *words]), world=world)
        trainer.fit()
        return {name: weight.detach().numpy() for name, weight in trainer.model.named_parameters()}

    alone = trained(World())
    for found in ranks(trained):
        for name, weight in found.items():
            assert weight == pytest.approx(alone[name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("words", [[], ["ema=ema", "precision=bf16"]], ids=["plain", "averaged, bf16"])
def test_it_is_saved_and_restored_bit_for_bit(words: list[str]) -> None:
    whole, _ = resumed([*WORDS, *SPLIT, *words], 3, 6)
    scale = drivetrain.load(whole.run_dir).model.get_parameter(SCALE)
    assert math.log(1 / 0.07) != pytest.approx(scale.item(), abs=1e-4), "it was trained"


def test_a_finished_run_of_one_encoder_predicts_and_is_exported(tiny: Callable[..., list[str]], says: Callable[..., str]) -> None:
    """Its temperature is among the weights, and no answer depends on it."""
    words = tiny("task=contrastive", "data=digits", "model=resnet9", "model.width=4", "loss.temperature=learned")
    result = run_to_end(words)
    loaded, x = drivetrain.load(result.run_dir), torch.rand(3, 1, 8, 8)
    with loaded.computing():
        expected = loaded.model(x)
    says("export", result.run_dir, "it.pt2")
    torch.testing.assert_close(torch.export.load("it.pt2").module()(x), expected, rtol=1e-4, atol=1e-5)
    says("export", result.run_dir, "it.safetensors")
    assert safetensors.torch.load_file("it.safetensors")[SCALE].dim() == 0


def test_the_parameter_of_the_model_is_taken_where_it_has_one(
    trainer_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' CLIP has one."""
    import halves

    class Scaled(halves.Both):
        def __init__(self, **given: int) -> None:
            super().__init__(**given)
            self.logit_scale = torch.nn.Parameter(torch.tensor(2.0))

    monkeypatch.setattr(halves, "Both", Scaled)
    trainer = trainer_of(prepare(WORDS))
    assert trainer.model.get_parameter(SCALE).item() == 2
    trainer.fit()
    assert trainer.model.get_parameter(SCALE).item() != 2


def test_ranks_that_hold_a_part_of_the_weights_are_refused() -> None:
    with pytest.raises(UserError, match=r"loss.temperature=learned and parallel=fsdp exclude each other.*set parallel=ddp"):
        prepare([*WORDS, "parallel=fsdp", "parallel.nproc=2"])
