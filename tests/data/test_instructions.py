"""data=instructions: the chat template's text, targets at answers alone, cuts, packed rows, and two forms of sets."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import drivetrain
from drivetrain.core.errors import DataError, UserError
from drivetrain.data import instructions
from drivetrain.data.instructions import DEFAULT, ChatTemplate, exercises, in_words, messages_of
from drivetrain.inference.loaded import load
from drivetrain.model.transformers import Transformers
from tests.data.test_model_tokenizer import SIZES, tokenizer
from tests.support import later
from tests.support.same_end import differences
from tests.support.to_end import continued, run_to_end

transformers = later.package("transformers")

MARKS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content + '</s>' }}{% endgeneration %}"
    "{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
FORGETS = "{% for m in messages %}{% if loop.last or m.role != 'assistant' %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
TALKS = [
    [
        {"role": "user", "content": f"say {'ab 9 ' * (i % 9)}{i}"},
        {"role": "assistant", "content": f"it is {i}"},
        {"role": "user", "content": "more ¿" * (i % 3) + "?"},
        {"role": "assistant", "content": "no €" * (1 + i % 4)},
    ][: 2 + 2 * (i % 2)]
    for i in range(40)
]
KEYS = {"messages": "messages", "prompt": "prompt", "completion": "completion"}


@pytest.fixture(params=["llama", "gpt2"])
def folder(request, tmp_path: Path) -> Path:
    return folder_of(request.param, tmp_path, "no template" if request.param == "gpt2" else MARKS)


def folder_of(kind: str, tmp_path: Path, template: str = MARKS, **more) -> Path:
    """A folder with a tiny model and its tokenizer."""
    torch.manual_seed(0)
    own = tokenizer(False, eos_token="</s>")
    if template != "no template":
        own.chat_template = template
    own.save_pretrained(tmp_path / kind)
    config = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, vocab_size=len(own), max_position_embeddings=128, **more),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, n_positions=128, vocab_size=len(own), resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    }[kind]()  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / kind)
    return tmp_path / kind


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))


HOSTILE = {
    "class": "{{ ''.__class__.__mro__ }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "attribute": "{{ messages|attr('append') }}{{ 0()}}",
    "format": "{{ '{0.__class__}'.format(1) }}{{ 1 / 0 }}",
    "change": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}",
    "refuses": "{{ raise_exception('no') }}",
}


@pytest.mark.parametrize("template", HOSTILE.values(), ids=HOSTILE)
def test_a_strangers_template_does_nothing_but_write_text(template):
    with pytest.raises(DataError, match="chat template refuses"):
        ChatTemplate(template).prompt(TALKS[0])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "it took longer than 0.1 s"),
        ("{{ 10 ** (10 ** 9) }}", "it took longer than 0.1 s"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
        ("x" * 70_000, "70,000 characters"),
        (7, "none that transformers writes"),
        (["text"], "none that transformers writes"),
        ([{"name": "default", "template": {"a": 1}}], "none that transformers writes"),
    ],
)
def test_a_strangers_template_is_bounded(tmp_path, monkeypatch, template, says):
    monkeypatch.setattr(instructions, "TEMPLATE_S", 0.1)
    data = instructions.Instructions(path=None)
    settings = {"chat_template": template}
    data._model = SimpleNamespace(tokenizer_files=lambda: (tmp_path, settings))
    with pytest.raises(UserError, match=says):
        data._chat()


def words(folder: Path, *more: str) -> list[str]:
    return [
        "task=instruction", "model=transformers", f"model.name={folder}", "model.pretrained=true", "data=instructions",
        "data.path=talks.jsonl", "data.length=100", "data.validation=null", "data.drop_last=false", *more,
    ]  # fmt: skip


def test_tokens_and_targets_are_those_of_transformers_own_template(tmp_path, make):
    """Its `apply_chat_template` says which tokens there are and, by the template's marks, which of them are answers."""
    folder = folder_of("llama", tmp_path)
    source = make(*words(folder)).train_data.source
    own = transformers.AutoTokenizer.from_pretrained(folder)
    expected = set()
    for talk in TALKS:
        found = own.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, answers = torch.tensor(found["input_ids"]), torch.tensor(found["assistant_masks"])
        assert 0 < answers.sum() < len(answers)
        expected.add((*ids[:-1].tolist(), *ids[1:].masked_fill(answers[1:] == 0, -100).tolist()))
    got = set()
    for index in range(len(source)):
        x, y = source.fetch(torch.tensor([index]))
        assert x.shape == y.shape == (1, int(source.lengths[index]))
        got.add((*x[0].tolist(), *y[0].tolist()))
    assert len(got) > 30
    assert got <= expected


def test_without_marks_answers_are_what_they_add_to_the_text(tmp_path, make):
    folder = folder_of("gpt2", tmp_path, "no template")
    source = make(*words(folder, "data.length=128")).train_data.source
    own = transformers.AutoTokenizer.from_pretrained(folder)
    _, y = source.fetch(torch.arange(len(source)))
    answers = {own.decode(row[row != -100]) for row in y}
    assert answers <= {"".join(f"{m['content']}</s>\n\n" for m in talk if m["role"] == "assistant") for talk in TALKS}


def test_padding_counts_for_nothing_and_ids_are_the_batchs(tmp_path, make):
    source = make(*words(folder_of("llama", tmp_path))).train_data.source
    x, y = source.fetch(torch.arange(4))
    for n in range(4):
        alone_x, alone_y = source.fetch(torch.tensor([n]))
        assert torch.equal(x[n, : alone_x.shape[1]], alone_x[0])
        assert torch.equal(y[n, : alone_y.shape[1]], alone_y[0])
        assert (y[n, alone_y.shape[1] :] == -100).all()


def test_what_is_cut_and_what_has_no_answer_left_is_counted(tmp_path, make, caplog):
    caplog.set_level(logging.INFO, "drivetrain")
    folder = folder_of("llama", tmp_path)
    own, length = transformers.AutoTokenizer.from_pretrained(folder), 24
    sizes, firsts = [], []
    for talk in TALKS:
        found = own.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        sizes.append(len(found["input_ids"]) - 1)
        firsts.append(found["assistant_masks"].index(1))
    (tmp_path / "held.jsonl").write_text((tmp_path / "talks.jsonl").read_text())
    source = make(*words(folder, f"data.length={length}", "data.test=held.jsonl")).train_data.source
    lost = sum(first > length for first in firsts)
    cut = sum(size > length for size in sizes)
    assert 0 < lost < cut < len(TALKS)
    said = f"{cut} of 40 training conversations are longer than data.length={length} tokens, and are cut; {lost} of them have no"
    assert said in caplog.text
    assert len(source) == len(TALKS) - lost
    assert int(source.lengths.max()) == length


def test_a_prompt_and_its_completion_are_two_messages():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages_of({"prompt": "a", "completion": "b"}, KEYS) == talk
    assert messages_of({"prompt": talk[:1], "completion": talk[1:]}, KEYS) == talk
    assert messages_of({"messages": talk}, KEYS, asks=True) == messages_of({"prompt": "a"}, KEYS, asks=True) == talk[:1]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"text": "a"}, "neither 'messages' nor 'prompt' and 'completion', but text"),
        ({"prompt": "a"}, "has a 'prompt' and no 'completion'"),
        ({"messages": "a"}, "messages are a list of objects"),
        ({"messages": [{"role": "user"}, "b"]}, "messages are a list of objects"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages are a list of objects"),
        ({"messages": [{"role": "user", "content": "a"}]}, "none of its messages is an answer"),
        ({"messages": []}, "messages are a list of objects"),
    ],
)
def test_odd_rows_are_refused_with_their_place(entry, problem, tmp_path, make):
    with pytest.raises(DataError, match=problem):
        messages_of(entry, KEYS)
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALKS[0]}) + "\n" + json.dumps(entry) + "\n")
    with pytest.raises(UserError, match=rf"talks\.jsonl:2: .*{problem}"):
        make(*words(folder_of("llama", tmp_path)))


def test_a_template_that_changes_its_beginning_needs_marks(tmp_path, make):
    with pytest.raises(UserError, match="does not keep its beginning as a conversation goes on"):
        make(*words(folder_of("llama", tmp_path, FORGETS)))


def test_a_template_cannot_run_code():
    with pytest.raises(DataError, match="the chat template refuses these messages"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").prompt(TALKS[0])
    with pytest.raises(DataError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").prompt(TALKS[0])


def test_what_ends_an_answer_is_found_in_the_template():
    assert ChatTemplate(DEFAULT, {"eos_token": "</s>"}).ends == ["</s>"]
    assert ChatTemplate().ends == ["<|end|>"]
    assert ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}", {"eos_token": "<e>"}).ends == [
        "[/]",
        "<e>",
    ]


def test_a_set_of_datasets_is_read_as_lines_are(tmp_path, make):
    datasets = pytest.importorskip("datasets")
    folder = folder_of("llama", tmp_path)
    rows = {"messages": TALKS}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(str(tmp_path / "hub"))
    lines, saved = make(*words(folder)), make(*words(folder, "data.path=hub/train"))
    for a, b in zip(
        lines.train_data.source.fetch(torch.arange(20)), saved.train_data.source.fetch(torch.arange(20)), strict=True
    ):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match=r"hub has several splits: set data\.path to one, such as hub/train"):
        make(*words(folder, "data.path=hub"))


def test_numbers_in_words():
    assert [in_words(n) for n in (0, 13, 40, 42, 500, 619, 907)] == [
        "zero", "thirteen", "forty", "forty-two", "five hundred", "six hundred and nineteen", "nine hundred and seven",
    ]  # fmt: skip
    assert len({str(talk) for talk in exercises()}) == 1000


# --- packing ---


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex"])
def test_packed_rows_have_the_loss_and_the_gradients_of_padded_ones(folder, attention, fitted, monkeypatch):
    """Accumulated too: the mean is over all targets of the update, wherever they are. A CPU runs flex uncompiled, to test it."""
    if attention == "flex":
        from transformers.integrations import flex_attention

        monkeypatch.setattr(Transformers, "validate_device", lambda *_: iter(()))
        if "gpt2" in str(folder):
            pytest.skip("transformers has no flex for GPT-2")
        monkeypatch.setattr(flex_attention, "WrappedFlexAttention", lambda training: lambda: flex_attention.flex_attention)
        monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    grads, losses, shapes = [], [], []
    for more in ([], ["data.packing=true"], ["data.packing=true", "batch=accumulate", "batch.accumulation_steps=3"]):
        given = words(folder, f"model.attention={attention}", "batch.global_batch=15", "clip=none", "updates=3", *more)
        with torch.compiler.set_stance("force_eager"):  # else transformers compiles the mask of each shape
            trainer = fitted(*given)
        losses.append(trainer.log.writers[0].losses)
        grads.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        _, y = trainer.train_data.source.fetch(torch.arange(15))
        shapes.append(tuple(y.shape))
    assert shapes[1][0] < shapes[0][0] == 15
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)
    assert len(losses[0]) == 3
    for other in grads[1:]:
        for name, p in grads[0].items():
            torch.testing.assert_close(other[name], p, rtol=1e-3, atol=1e-5)


def test_a_packed_batch_has_every_token_once_and_begins_anew_at_each_text(tmp_path, make):
    folder = folder_of("llama", tmp_path)
    padded, packed = (make(*words(folder, *more)).train_data.source for more in ([], ["data.packing=true"]))
    which = torch.randperm(len(padded), generator=torch.Generator().manual_seed(1))[:12]
    (x, y), (rows, targets) = padded.fetch(which), packed.fetch(which)
    assert rows["input_ids"].shape == rows["position_ids"].shape == targets.shape
    assert targets.shape[1] <= 100
    begins = (rows["position_ids"] == 0).nonzero()
    texts = set()
    for row, start in begins.tolist():
        length = 1
        while start + length < targets.shape[1] and rows["position_ids"][row, start + length] == length:
            length += 1
        part = slice(start, start + length)
        texts.add((*rows["input_ids"][row, part].tolist(), *targets[row, part].tolist()))
    for n, length in enumerate(padded.lengths[which].tolist()):
        assert (*x[n, :length].tolist(), *y[n, :length].tolist()) in texts
    assert int((targets != -100).sum()) == int((y != -100).sum())


def test_texts_to_continue_are_packed_too(tmp_path, fitted):
    folder = folder_of("gpt2", tmp_path, "no template")
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": str(talk)[: 30 + 7 * (n % 9)]}) + "\n" for n, talk in enumerate(TALKS))
    )
    common = ["model=transformers", f"model.name={folder}", "model.pretrained=true", "data=jsonl", "data.path=texts.jsonl",
              "data.length=100", "data.validation=null", "loss=next_token", "batch.global_batch=12", "updates=2"]  # fmt: skip
    padded, packed = fitted(*common), fitted(*common, "data.packing=true")
    assert padded.log.writers[0].losses == pytest.approx(packed.log.writers[0].losses, rel=1e-6)


def test_a_model_that_lets_texts_of_a_row_see_each_other_is_refused(tmp_path, make, monkeypatch):
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(UserError, match=r"data.packing=true: model.name=.* \(llama, sdpa\) lets a text see others of its row"):
        make(*words(folder_of("llama", tmp_path), "data.packing=true"))


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["task=language_modelling", "model=gpt", "data=jsonl", "data.path=talks.jsonl", "data.packing=true"],
         "set model=transformers"),
        (["task=text_classification", "data=jsonl", "data.path=talks.jsonl", "data.label=kind", "data.packing=true",
          "model=transformers", "model.name=bert"], "data.packing=true is for targets at each token"),
        (["task=instruction", "model.name=llama", "data=jsonl", "data.path=talks.jsonl"], "set data=instructions"),
        (["data=instructions", "data.path=talks.jsonl", "model=mlp"], "set task=instruction"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_with_is_refused(more, problem, problems):
    assert any(problem in line for line in problems(*more))


# --- whole runs ---


def test_a_run_is_resumed_bit_for_bit(tmp_path, tiny):
    folder = folder_of("llama", tmp_path)
    common = words(
        folder, "data.packing=true", "epochs=2", "batch.tokens=200", "saving=last", "saving.every_updates=3", "updates=12"
    )
    whole = run_to_end(tiny(*common, "output_dir=whole"))
    first = drivetrain.train(tiny(*common, "output_dir=parts", "updates=3"))
    rest = continued(first.run_dir, "updates=12")
    found = differences(Path(rest.run_dir), Path(whole.run_dir))
    assert not [name for name in found if name == "losses" or name.startswith((".weights", ".state.optimizer"))]
    assert rest.metrics == whole.metrics
    loaded = load(whole.run_dir)
    assert loaded.text_of({"input_ids": torch.tensor([[70, 71]])})  # a page shows the texts of packed samples
