"""The heads of model=transformers beside the usual ones: masked tokens, words, numbers, and the trunk. Each learns a small set.

Where Hugging Face's model computes the loss itself, it is the same.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drivetrain.core.errors import UserError
from drivetrain.core.step.microbatch import Request
from drivetrain.loss.language import MaskedToken, Masking
from tests.support import later, slow
from tests.support.to_end import run_to_end

transformers = later.package("transformers")
pytest.importorskip("tokenizers")

SIZES = "hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, hidden_dropout_prob: 0.0, "
BERT = ["model=transformers", "model.name=bert", f"model.config={{{SIZES}attention_probs_dropout_prob: 0.0}}"]
FAST = ["optimizer=adamw", "optimizer.lr=0.02", "scheduler=constant"]
MASKED = [*BERT, "data=stdlib", "data.max_files=10", "data.length=16", "data.test_samples=8", "loss=masked_token"]


@pytest.fixture(autouse=True)
def _run_dir(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()


def batches(trainer: Any) -> list[Any]:
    return list(trainer.read())


def as_trained_elsewhere(trainer: Any, call: Callable[[Any, Any], Any]) -> None:
    """The first batch's loss is that which a model of transformers computes itself, given the same targets."""
    batch = batches(trainer)[0]
    model = trainer.model.train()
    forward = model if isinstance(batch.x, torch.Tensor) else lambda x: model(**x)
    ours = trainer.evaluator.loss.step(forward, batch).detach()
    model._forward_hooks.clear()  # what takes the logits alone
    assert float(ours) == pytest.approx(float(call(model, batch).loss.detach()), rel=1e-6)


# --- masked tokens ---


def masked(share: float = 0.15, epoch: int = 0, indices: Any = None, length: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.arange(200) if indices is None else indices
    y = torch.arange(length).repeat(len(indices), 1) % 50
    y[:, -8:] = -100
    pipeline = SimpleNamespace(seed=3, classes=60)
    x, targets, _ = Masking(share, 59, 51).apply(y, y, indices, pipeline, Request(epoch, indices, 1.0))  # type: ignore[arg-type]
    return x, targets


def test_what_is_hidden_is_a_function_of_seed_epoch_and_sample():
    x, y = masked()
    again, _ = masked(indices=torch.tensor([7, 150]))
    assert torch.equal(again, x[[7, 150]])
    assert not torch.equal(masked(epoch=1)[0], x)
    assert (y[:, -8:] == -100).all()
    assert (x[:, -8:] == 51).all(), "padding"


def test_fifteen_of_a_hundred_are_hidden_and_eight_of_ten_of_them_become_the_mask():
    x, y = masked()
    real = (torch.arange(64).repeat(200, 1) % 50)[:, :56]
    x, y = x[:, :56], y[:, :56]
    chosen = y != -100
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(x[~chosen], real[~chosen])
    assert torch.equal(y[chosen], real[chosen])
    assert (x[chosen] == 59).float().mean() == pytest.approx(0.8, abs=0.03)
    assert (x[chosen] == real[chosen]).float().mean() == pytest.approx(0.1, abs=0.03)


def test_masked_tokens_have_the_loss_of_their_model(make):
    trainer = make(*MASKED)
    assert type(trainer.model).__name__ == "BertForMaskedLM"
    assert trainer.model.config.vocab_size == 257  # the bytes, and the mask

    def call(model: Any, batch: Any) -> Any:
        return model(input_ids=batch.x, attention_mask=(batch.x != 0).long(), labels=batch.y)

    as_trained_elsewhere(trainer, call)


def test_each_evaluation_hides_the_same_tokens(make):
    trainer = make(*MASKED)
    assert trainer.evaluator.metrics() == trainer.evaluator.metrics()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts whose tokens follow from their neighbours, and their words with classes."""
    file = tmp_path / "texts.jsonl"
    words = ["red", "apple", "green", "pear", "blue", "plum"]
    lines = [[words[2 * (i % 3)], words[(2 * i) % 6 + 1]] * 3 for i in range(60)]
    file.write_text("".join(
        json.dumps({"text": " ".join(line) + f" {i}", "tokens": [*line, str(i)], "tags": ["COLOUR", "FRUIT"] * 3 + ["O"]}) + "\n"
        for i, line in enumerate(lines)
    ))  # fmt: skip
    return file


def test_masked_tokens_are_learnt(texts, train):
    words = [*BERT, "data=jsonl", f"data.path={texts}", "data.length=32", "loss=masked_token", "metrics=[perplexity]", *FAST]
    result = train(*words, "epochs=60", "updates=120", "batch.global_batch=16")
    assert result.judged()["accuracy"] > 0.4  # of the most frequent byte: 0.2
    assert result.judged()["loss"] < 2.2


@pytest.mark.parametrize(
    "more",
    slow.but(
        lambda more: "accumulate" in more,
        ["batch=accumulate batch.accumulation_steps=4", "loader=workers", "parallel=ddp parallel.nproc=2"],
    ),
)
def test_however_the_samples_are_split_the_same_tokens_are_hidden(more, train):
    """The loss is the mean over all hidden tokens of an update."""
    words = [*MASKED, "updates=2", "optimizer=sgd", "optimizer.lr=0.5", "batch.global_batch=8"]
    assert train(*words, *more.split()).judged()["loss"] == pytest.approx(train(*words).judged()["loss"], rel=1e-6)


def test_a_causal_model_is_refused_for_masked_tokens(make):
    with pytest.raises(UserError, match="reads only the tokens before: set model=transformers"):
        make("model=gpt", "data=stdlib", "data.max_files=10", "data.length=16", "loss=masked_token")


def test_a_tokenizer_without_a_mask_is_refused():
    data = SimpleNamespace(two_samples=lambda _: torch.zeros(2, 3), pad_token=0, mask_token=None, classes=9)
    with pytest.raises(UserError, match="has no mask_token"):
        MaskedToken().steps(data)


# --- words ---

TAGGED = [*BERT, "data=words", "loss=token", "metrics=[f1]"]


def tokenizer(folder: Path) -> Path:
    """A BERT's tokenizer, whose words have several pieces, and a model to go with it."""
    folder.mkdir()
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "ap", "##ple", "green", "pe", "##ar", "blue", "pl", "##um"]
    pieces += [str(n) for n in range(10)] + [f"##{n}" for n in range(10)]
    made = transformers.BertTokenizer(vocab={piece: n for n, piece in enumerate(pieces)})
    made.save_pretrained(folder)
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=len(pieces),
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    return folder


def test_a_word_has_its_class_at_its_first_token(texts, tmp_path, make):
    folder = tokenizer(tmp_path / "bert")
    own = ["model=transformers", f"model.name={folder}", "model.pretrained=true", *TAGGED[3:]]
    trainer = make(*own, f"data.path={texts}", "data.length=12", "data.validation=null", "batch.global_batch=8")
    assert type(trainer.model).__name__ == "BertForTokenClassification"
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    source = trainer.train_data.source
    x, y = source.fetch(torch.arange(4))
    lines = [json.loads(line) for line in texts.read_text().splitlines()]
    names = ["COLOUR", "FRUIT", "O"]
    for tokens, targets, text in zip(x, y, source.identities(), strict=False):
        line = next(line for line in lines if " ".join(line["tokens"]) == text)
        found = theirs(line["tokens"], is_split_into_words=True, truncation=True, max_length=12)
        assert tokens[: len(found["input_ids"])].tolist() == found["input_ids"]
        of = found.word_ids()
        firsts = [n is not None and n != before for n, before in zip(of, [None, *of], strict=False)]
        expected = [names.index(line["tags"][n]) if first else -100 for n, first in zip(of, firsts, strict=True)]
        assert targets[: len(expected)].tolist() == expected

    def call(model: Any, batch: Any) -> Any:
        return model(input_ids=batch.x, attention_mask=(batch.x != 0).long(), labels=batch.y)

    as_trained_elsewhere(trainer, call)


def test_the_classes_of_words_are_learnt(texts, train):
    """By bytes, whose words are apart too."""
    words = [*TAGGED, f"data.path={texts}", "data.length=48", *FAST, "epochs=40", "updates=60", "batch.global_batch=16"]
    result = train(*words)
    assert result.judged()["accuracy"] > 0.95
    assert result.judged()["f1"] > 0.9


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"tokens": ["a", "b"], "tags": ["X"]}, "a list of a class for each of them"),
        ({"tokens": ["a", 3], "tags": ["X", "Y"]}, "has a int among its words"),
        ({"tokens": ["a"], "tags": [1.5]}, "'tags' is float: a class is a text or a whole number"),
        ({"text": "a"}, "has no 'tokens' (data.text)"),
    ],
)
def test_lines_that_are_no_words_with_classes_are_named(line, says, tmp_path, make):
    (tmp_path / "w.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=re.escape(says)):
        make(*TAGGED, f"data.path={tmp_path / 'w.jsonl'}")


# --- numbers, and the trunk ---

NUMBERS = """
import torch

class Texts(torch.utils.data.Dataset):
    def __init__(self, split):
        draw = torch.Generator().manual_seed(len(split))
        self.ids = torch.randint(1, 20, (48, 6), generator=draw)

    def __len__(self):
        return 48

    def __getitem__(self, i):
        return {"input_ids": self.ids[i]}, (self.ids[i] < 10).float().mean()
"""


def test_numbers_of_texts_have_the_loss_of_their_model_and_are_learnt(make, fitted, own_module):
    own_module("numbers_of", NUMBERS)
    data = ["data=own", "data.target=numbers_of.Texts", "trust=[numbers_of]", "data.targets=values", "loss=mse"]
    trainer = make(*BERT, *data, "model.config.vocab_size=20", *FAST, "updates=60", "epochs=60", "batch.global_batch=16")
    assert type(trainer.model).__name__ == "BertForSequenceClassification"
    first = trainer.evaluator.metrics()["loss"]
    as_trained_elsewhere(trainer, lambda model, batch: model(**batch.x, labels=batch.y))
    trainer = fitted(*BERT, *data, "model.config.vocab_size=20", *FAST, "updates=60", "epochs=60", "batch.global_batch=16")
    assert trainer.evaluator.metrics()["loss"] < first / 2


def test_the_trunk_embeds_images_for_a_contrastive_loss(tiny):
    vit = "{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, patch_size: 4}"
    run_to_end(tiny(
        "task=contrastive", "model=transformers", "model.name=vit", f"model.config={vit}", "updates=3", "augment=[flip_crop]",
    ))  # fmt: skip
