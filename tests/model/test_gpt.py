"""model=gpt: what a place may look at, and what padding must not change."""

import math

import pytest
import torch

from drivetrain.data.text import Texts
from drivetrain.loss.language import NextToken
from drivetrain.model.gpt import Gpt, Ngrams, apply_rotary, rotary_table

LENGTH = 24


@pytest.fixture(params=[1, 3], ids=["plain", "ngrams"])
def model(request, float64) -> Gpt:
    """A model in double precision all of whose weights do something."""
    torch.manual_seed(0)
    made = Gpt(LENGTH, 257, 32, 3, 2, dropout=0.0, ngrams=request.param, buckets=64, drop_path=0.0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return made


@pytest.mark.parametrize("place", [0, 1, 11, LENGTH - 1])
def test_a_token_changes_what_comes_after_it_and_nothing_before(model, place):
    x = torch.randint(257, (2, LENGTH))
    other = x.clone()
    other[:, place] = (x[:, place] + 1) % 257
    before, after = model(x), model(other)
    torch.testing.assert_close(after[:, :place], before[:, :place], rtol=0, atol=1e-12)
    assert (after[:, place:] - before[:, place:]).abs().amax((0, 2)).min() > 1e-6


def test_padding_changes_neither_loss_nor_gradients(model):
    source = Texts([bytes(range(5)), bytes(range(20))], LENGTH)
    loss = NextToken()

    def of(*batches: list[int]) -> tuple[float, list[torch.Tensor]]:
        total = torch.zeros(())
        for indices in batches:
            x, y = source.fetch(torch.tensor(indices))
            total = total + loss(model(x), y) * source.lengths[indices].sum() / source.lengths.sum()
        return total.item(), list(torch.autograd.grad(total, list(model.parameters())))

    apart, together = of([0], [1]), of([0, 1])
    source.pad_to = LENGTH
    padded = of([0, 1])
    for value, gradients in (together, padded):
        assert value == pytest.approx(apart[0], rel=1e-12)
        for a, b in zip(gradients, apart[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-13)


def test_it_begins_near_the_uniform_distribution_and_its_head_is_the_embedding():
    torch.manual_seed(0)
    model = Gpt(64, 257, 64, 4, 4, dropout=0.0, ngrams=4, buckets=8192, drop_path=0.0)
    assert model.head.weight is model.embedding.weight
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    x = torch.randint(256, (8, 64))
    assert NextToken()(model(x), torch.randint(256, (8, 64))).item() == pytest.approx(math.log(257), abs=0.1)


def test_rotary_products_depend_on_the_distance_alone(float64):
    table = rotary_table(LENGTH, 16)
    q, k = torch.randn(16), torch.randn(16)
    products = apply_rotary(q.expand(LENGTH, 16), table) @ apply_rotary(k.expand(LENGTH, 16), table).T
    for distance in (0, 3, 10):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along))
    assert products.diagonal(3)[0] != products.diagonal(10)[0]


def test_ngrams_look_at_so_many_tokens_and_no_more(float64):
    torch.manual_seed(0)
    ngrams = Ngrams(3, 4096, 8)
    for table in ngrams.tables:
        torch.nn.init.normal_(table.weight)
    x = torch.randint(257, (1, LENGTH))
    vectors = ngrams(x)
    for back in range(1, 5):
        other = x.clone()
        other[0, 10 - back] = (x[0, 10 - back] + 1) % 257
        assert torch.equal(ngrams(other)[0, 10], vectors[0, 10]) == (back > 2)


# Each of these computes the same as the plain model, or nearly.
TEXT = ["data=stdlib", "data.max_files=10", "data.length=32", "data.test_samples=4", "loss=next_token"]
SMALL = [*TEXT, "model=gpt", "model.width=32", "model.heads=2", "model.depth=2", "batch.global_batch=4", "updates=3"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["checkpointing=blocks"], marks=pytest.mark.slow),
        pytest.param(["checkpointing=selective"], marks=pytest.mark.slow),
        pytest.param(["compile=jit"], marks=pytest.mark.slow),
        pytest.param(["model.dropout=0.1"], marks=pytest.mark.slow),
        ["batch=bucketed", "precision=bf16"],
    ],
    ids=lambda w: "+".join(w),
)
@pytest.mark.slow
def test_it_trains_with_what_works_on_models(train, words):
    plain, other = train(*SMALL), train(*SMALL, *words)
    close = 1e-5 if words[0].startswith(("checkpointing", "compile")) else 0.05
    assert other.judged("final")["loss"] == pytest.approx(plain.judged("final")["loss"], rel=close)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["inductor", "regional", "step"])
def test_it_compiles(train, option):
    words = [*SMALL, "batch=bucketed", "batch.pad_to=32", "optimizer=adamw"]
    plain, other = train(*words), train(*words, f"compile={option}")
    assert other.judged("final")["loss"] == pytest.approx(plain.judged("final")["loss"], rel=1e-3)


def test_muon_takes_its_hidden_matrices_and_adamw_the_tables(make):
    trainer = make(*SMALL, "optimizer=muon", "model.ngrams=2")
    names = {p: name for name, p in trainer.model.named_parameters()}
    muon, adamw = ({names[p] for g in member.param_groups for p in g["params"]} for member in trainer.optimizer.members)
    assert {"embedding.weight", "ngrams.tables.0.weight"} < adamw
    assert {"blocks.0.feed_forward.up.weight", "blocks.1.feed_forward.down.weight"} < muon


def test_a_width_that_heads_do_not_divide_is_refused_with_the_nearest_that_do(problems):
    (problem,) = problems(*SMALL, "model.width=50", "model.heads=4")
    assert problem.startswith("model.width=50 does not divide into model.heads=4")
    assert problem.endswith("set model.width to 48 or 56")
