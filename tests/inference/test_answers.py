"""`drivetrain predict` of task=instruction: answers as transformers generates them, drawn by (seed, row), in any blocks."""

import csv
import json
from functools import cache
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.cli.main import main
from drivetrain.inference.answers import Answers, Drawing
from drivetrain.inference.finished import Choice
from drivetrain.inference.loaded import load
from tests.data.test_instructions import TALKS, folder_of, words
from tests.support import later
from tests.support.to_end import run_to_end

transformers = later.package("transformers")

PROMPTS = [{"messages": TALKS[n]} if n % 2 else {"prompt": f"say {n}"} for n in range(7)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run that was trained with averages, in the folder of its files, and the folder of its model."""
    home = tmp_path_factory.mktemp("answers")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        folder = folder_of("llama", home)
        Path("talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
        Path("prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
        result = run_to_end(
            [*words(folder), "updates=30", "epochs=20", "optimizer=adamw", "optimizer.lr=0.01", "ema=ema", "ema.decay=0.5",
             "saving=last", "batch.global_batch=8", "adapter=lora", "adapter.rank=2", "runtime.device=cpu", "output_dir=runs"]
        )  # fmt: skip
    return home, result.run_dir


@pytest.fixture
def run(made, monkeypatch):
    monkeypatch.chdir(made[0])
    return made[1]


def predicted(capsys, *words: str) -> list[dict[str, str]]:
    code = main(["predict", *map(str, words)])
    out = capsys.readouterr()
    assert code == (1 if "have no answer" in out.err else 0), out.err
    return list(csv.DictReader(out.out.splitlines()))


@cache
def alone(run: Path, average: bool):
    """The model and its tokenizer."""
    return load(run, choice=Choice(average=average)).model, transformers.AutoTokenizer.from_pretrained("llama")


def own(run: Path, prompt, most: int, average: bool = True) -> str:
    """The answer by transformers alone, to one prompt, without a cache or padding."""
    model, tokenizer = alone(run, average)
    messages = [{"role": "user", "content": prompt["prompt"]}] if "prompt" in prompt else prompt["messages"][:-1]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
    begin = ids.shape[1]
    for _ in range(most):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        if ids[0, -1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[0, begin:], skip_special_tokens=True)


@pytest.mark.parametrize("average", [False, True])
def test_greedy_answers_are_those_of_the_model_itself(average, run, capsys):
    rows = predicted(capsys, run, "prompts.jsonl", "--max-tokens", "12", f"average={str(average).lower()}")
    assert [row["input"] for row in rows] == [f"prompts.jsonl:{n}" for n in range(1, len(PROMPTS) + 1)]
    assert [row["answer"] for row in rows] == [own(run, prompt, 12, average) for prompt in PROMPTS]
    assert len({row["answer"] for row in rows}) > 1


def test_drawn_answers_follow_from_the_seed_and_the_row_however_blocks_are_cut(run, capsys):
    given = [run, "prompts.jsonl", "--max-tokens", "12", "--temperature", "1.5"]
    first = [row["answer"] for row in predicted(capsys, *given, "--batch", "7")]
    assert [row["answer"] for row in predicted(capsys, *given, "--batch", "2")] == first
    assert [row["answer"] for row in predicted(capsys, *given, "--batch", "7", "--seed", "1")] != first
    assert first != [row["answer"] for row in predicted(capsys, run, "prompts.jsonl", "--max-tokens", "12")]


def test_a_draw_has_the_probabilities_of_the_softmax():
    logits, temperature, rows = torch.tensor([1.0, 0.0, -1.0, 2.0]), 2.0, 20_000
    drawing = Drawing(temperature, 3, torch.arange(rows), 0)
    drawn = drawing(torch.zeros(rows, 5, dtype=torch.int64), logits.expand(rows, 4)).argmax(-1)
    shares = torch.bincount(drawn, minlength=4) / rows
    torch.testing.assert_close(shares, (logits / temperature).softmax(0), atol=0.015, rtol=0)


def test_a_stop_ends_an_answer_before_it(run, capsys):
    whole = [row["answer"] for row in predicted(capsys, run, "prompts.jsonl", "--max-tokens", "12")]
    stop = next(answer[2:4] for answer in whole if len(answer) > 6)
    cut = [row["answer"] for row in predicted(capsys, run, "prompts.jsonl", "--max-tokens", "12", "--stop", stop)]
    assert cut == [answer.partition(stop)[0] for answer in whole] != whole


def test_a_bad_row_is_answered_in_its_place(run, capsys):
    lines = [
        json.dumps({"prompt": "say 1"}),
        "{",
        json.dumps({"text": "x"}),
        json.dumps({"prompt": "say more " * 40}),
        json.dumps({"prompt": "say 2"}),
    ]
    Path("odd.jsonl").write_text("\n".join(lines) + "\n")
    rows = predicted(capsys, run, "odd.jsonl", "--max-tokens", "12")
    assert [bool(row["error"]) for row in rows] == [False, True, True, True, False]
    assert rows[1]["error"].startswith("odd.jsonl:2: not JSON")
    assert "neither 'messages' nor 'prompt'" in rows[2]["error"]
    assert "the run has data.length=100: shorten it" in rows[3]["error"]
    alone = [own(run, {"prompt": f"say {n}"}, 12) for n in (1, 2)]
    assert [rows[0]["answer"], rows[4]["answer"]] == alone


def test_answers_that_would_not_fit_into_the_models_positions_are_refused_in_their_place(run, capsys):
    (row,) = predicted(capsys, run, _one("say 5"), "--max-tokens", "127")
    assert row["error"].startswith("the prompt has ")
    assert "of the model's 128 positions: give --max-tokens" in row["error"]


def _one(prompt: str) -> str:
    Path("one.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
    return "one.jsonl"


def test_lines_of_standard_input_are_prompts(run, capsys, monkeypatch):
    import io
    import sys

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"say 0\nsay 2\n")))
    rows = predicted(capsys, run, "-", "--max-tokens", "12")
    assert [row["answer"] for row in rows] == [own(run, {"prompt": f"say {n}"}, 12) for n in (0, 2)]


def test_a_changed_template_is_refused(run, refused):
    file = Path("llama/chat_template.jinja")
    text = file.read_text()
    file.write_text(text + " ")
    try:
        assert "its chat template is not that of model.name=" in refused("predict", run, _one("a"))
    finally:
        file.write_text(text)


@pytest.mark.parametrize("given", [["--temperature", "-1"], ["--max-tokens", "0"]])
def test_odd_settings_are_refused(given, run, refused):
    assert f"{given[0]} {given[1]}" in refused("predict", run, "prompts.jsonl", *given).replace("-1.0", "-1")


def test_an_export_has_the_template_and_answers_alike(run, capsys):
    assert main(["export", str(run), "handed", "--format", "transformers"]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained("handed")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained("llama").chat_template
    model = transformers.AutoModelForCausalLM.from_pretrained("handed")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    answer = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == own(run, {"prompt": "say 3"}, 12)


def test_a_model_without_generate_is_named(run):
    loaded = load(run)
    loaded.model = torch.nn.Linear(1, 1)
    with pytest.raises(drivetrain.core.errors.UserError, match="Linear has no method `generate`"):
        Answers(loaded)
