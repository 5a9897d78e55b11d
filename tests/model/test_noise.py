"""model.embedding_noise: NEFTune's noise on the embeddings of tokens."""

import math

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.model import noise

TEXT = [
    "data=stdlib", "data.max_files=10", "data.length=16", "data.test_samples=8", "loss=next_token", "model=gpt", "model.width=16",
    "model.heads=2", "model.depth=1",
]  # fmt: skip


def embedded(trainer) -> torch.Tensor:
    return trainer.model.embedding(torch.arange(16).repeat(64, 1)).detach()


def test_its_size_is_the_papers_and_an_evaluation_has_none(make):
    trainer = make(*TEXT, "model.embedding_noise=5")
    table = trainer.model.embedding.weight.detach()[:16]
    trainer.model.train()
    first, second = ((embedded(trainer) - table) for _ in range(2))
    bound = 5 / math.sqrt(16 * 16)
    for found in (first, second):
        assert float(found.abs().max()) == pytest.approx(bound, rel=0.01)
        assert float(found.std()) == pytest.approx(bound / math.sqrt(3), rel=0.02)  # uniform
    assert not torch.equal(first, second)
    trainer.model.eval()
    assert torch.equal(embedded(trainer), table.expand(64, -1, -1))


def test_it_is_that_of_the_first_embedding_or_of_the_one_that_transformers_names():
    model = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Embedding(3, 4))
    noise.add(model, 5.0)
    noise.add(torch.nn.ModuleList([model]), 0.0)
    assert [len(m._forward_hooks) for m in model] == [2, 0]
    model.get_input_embeddings = lambda: model[1]
    noise.add(model, 5.0)
    assert [len(m._forward_hooks) for m in model] == [2, 1]
    with pytest.raises(UserError, match=r"the model has no torch\.nn\.Embedding"):
        noise.add(torch.nn.Linear(3, 4), 5.0)


def test_a_run_draws_the_same_noise_again_and_saves_no_more(fitted):
    noisy, again, plain = (fitted(*TEXT, f"model.embedding_noise={alpha}", "updates=2").model.state_dict() for alpha in (5, 5, 0))
    assert noisy.keys() == plain.keys()
    assert all(torch.equal(t, again[name]) for name, t in noisy.items())
    assert not all(torch.equal(t, plain[name]) for name, t in noisy.items())


def test_images_have_none(problems):
    assert any("model.embedding_noise is added to the embeddings of tokens" in p for p in problems("model.embedding_noise=5"))
