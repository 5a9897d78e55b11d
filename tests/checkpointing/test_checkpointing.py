"""Recomputed activations: the same gradients and statistics, and truly recomputed."""

import pytest
import torch
from torch import nn

from drivetrain.checkpointing import Blocks
from drivetrain.core.blocks import repeated_blocks

MODELS = {
    "resnet9": ["model=resnet9", "model.width=8"],
    "mlp with dropout": ["model=mlp", "model.hidden=[32,32,32]", "model.dropout=0.5"],
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("split", [[], ["batch=accumulate", "batch.accumulation_steps=2"]], ids=["whole", "accumulated"])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_equal_none_in_gradients_statistics_and_weights(make, each_update, model, split, precision):
    seen, forwards, ends = [], [], []
    for option in ("none", "blocks"):
        trainer = make(*MODELS[model], *split, "updates=3", f"precision={precision}", f"checkpointing={option}", "saving=none")
        inner = next(m for b in repeated_blocks(trainer.model) for m in b.modules() if isinstance(m, nn.Conv2d | nn.Linear))
        count = []
        inner.register_forward_hook(lambda m, *_, count=count: count.append(1))
        seen.append(each_update(trainer, lambda t=trainer: [p.grad.clone() for p in t.model.parameters()]))
        trainer.progress.evaluated = 3
        trainer.fit()
        forwards.append(len(count))
        ends.append(trainer.model.state_dict())
    micro_batches = 3 * (2 if split else 1)
    assert forwards == [micro_batches, 2 * micro_batches]  # it ran once, and again in the backward
    assert len(seen[0]) == len(seen[1]) == 3
    for without, recomputed in zip(*seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(without, recomputed, strict=True))
        assert any(g.any() for g in without)
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_batch_norm_counts_a_recomputed_batch_once(make):
    trainer = make(*MODELS["resnet9"], "checkpointing=blocks", "updates=3")
    trainer.fit()
    counters = [v for name, v in trainer.model.state_dict().items() if name.endswith("num_batches_tracked")]
    assert len(counters) == 8
    assert {int(c) for c in counters} == {3}
    assert all(m.momentum == 0.1 for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d))


def test_less_is_kept_for_the_backward(make):
    """The bytes that autograd saves between forward and backward."""

    def saved_bytes(option: str) -> int:
        trainer = make("model=mlp", "model.hidden=[64,64,64,64]", f"checkpointing={option}")
        weights = {p.data_ptr() for p in trainer.model.parameters()}
        total = 0

        def pack(t: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += t.numel() * t.element_size() * (t.untyped_storage().data_ptr() not in weights)
            return t

        x = torch.randn(256, 3, 8, 8)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            trainer.step.forward(x)
        return total

    assert 0 < saved_bytes("blocks") < 0.75 * saved_bytes("none")


def test_evaluation_is_not_checkpointed(make, monkeypatch):
    import torch.utils.checkpoint as checkpointing

    trainer = make(*MODELS["resnet9"], "checkpointing=blocks")
    called, original = [], checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", lambda *a, **k: called.append(1) or original(*a, **k))
    trainer.evaluator.metrics()
    assert not called


def test_names_stay_plain(make):
    plain, changed = make(*MODELS["resnet9"]), make(*MODELS["resnet9"], "checkpointing=blocks")
    assert list(plain.model.state_dict()) == list(changed.model.state_dict())
    assert [n for n, _ in plain.model.named_modules()] == [n for n, _ in changed.model.named_modules()]


def test_the_block_can_be_named(make):
    trainer = make(*MODELS["resnet9"], "checkpointing=blocks", "checkpointing.block=Residual")
    changed = [name for name, m in trainer.model.named_modules() if "forward" in vars(m)]
    assert changed == ["features.3", "features.7"] or len(changed) == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.stack:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("option", "says"), [(Blocks(), "no repeated block"), (Blocks("Attention"), "no module of class 'Attention'")]
)
def test_a_model_without_such_blocks_is_refused_with_the_classes_it_has(option, says):
    with pytest.raises(ValueError, match=says) as refused:
        option.apply(Twice())
    assert "checkpointing.block" in str(refused.value)
    assert "Sequential" in str(refused.value)


def test_the_outermost_repeated_modules_are_the_blocks(make):
    model = make(*MODELS["resnet9"]).model
    assert {type(b).__name__ for b in repeated_blocks(model)} == {"Residual"}
    assert len(repeated_blocks(model)) == 2
    assert len(repeated_blocks(model, "BatchNorm2d")) == 8
