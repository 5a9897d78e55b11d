"""A text model is served without drivetrain: as ONNX, of texts of any length, and as a folder of transformers."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import drivetrain
from drivetrain.cli import main
from tests.support.command import ROOT

TEXTS = [(f"{'good' if n % 2 else 'bad'} film {n} " * (1 + n % 4), "pos" if n % 2 else "neg") for n in range(60)]
SMALL = [f"model.config.{key}={value}" for key, value in (
    ("hidden_size", 16), ("num_hidden_layers", 1), ("num_attention_heads", 2), ("intermediate_size", 32),
)]  # fmt: skip
SHORT = ["logger=[]", "runtime.device=cpu", "batch.global_batch=8", "data=jsonl", "data.length=64", "model=transformers", *SMALL]


@pytest.fixture
def texts() -> str:
    Path("texts.jsonl").write_text("\n".join(json.dumps({"text": text, "label": label}) for text, label in TEXTS))
    return "data.path=texts.jsonl"


def test_a_classifier_of_texts_answers_alike_in_onnxruntime_and_transformers(texts: str, monkeypatch) -> None:
    transformers = pytest.importorskip("transformers")
    run = drivetrain.train([*SHORT, texts, "task=text_classification", "data.label=label", "model.name=bert", "updates=30"])
    for file in ("model.onnx", "folder"):
        assert main.main(["export", str(run.run_dir), file, *(["--format", "transformers"] if file == "folder" else [])]) == 0
    asked = ["good film 3", "bad film 4 bad film 4 bad film 4", "a good film"]
    monkeypatch.setattr(sys, "argv", ["server.py", "model.onnx", "8000"])
    server = runpy.run_path(str(ROOT / "examples/serve/server.py"))
    answers = server["answer"](asked)
    assert answers == [server["answer"]([text])[0] for text in asked], "padding is masked"
    network = transformers.AutoModelForSequenceClassification.from_pretrained("folder").eval()
    for text, label in zip(asked, answers, strict=True):
        tokens = torch.tensor([[byte + 1 for byte in text.encode()]])
        best = int(network(tokens, attention_mask=torch.ones_like(tokens)).logits.argmax())
        assert server["about"]["classes"][best] == label


FIXED = """
import torch
X = torch.randint(9, (48, 6), generator=torch.Generator().manual_seed(0))


class Codes(torch.utils.data.Dataset):
    num_classes = 9

    def __init__(self, split):
        pass

    def __len__(self):
        return 48

    def __getitem__(self, n):
        return X[n], X[n, 0]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(24, 9)

    def forward(self, x):
        return self.head(self.table(x).flatten(1))
"""


@pytest.mark.parametrize("file", ["model.onnx", "model.pt2"])
def test_codes_of_a_fixed_number_are_no_texts(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("codes_of_tests.py").write_text(FIXED)
    own = ["data=own", "data.target=codes_of_tests.Codes", "model=own", "model.target=codes_of_tests.Net", "updates=2"]
    run = drivetrain.train([*own, "trust=[codes_of_tests]", "batch.global_batch=8", "logger=[]", "runtime.device=cpu"])
    assert main.main(["export", str(run.run_dir), file]) == 0


def test_a_model_of_packed_texts_is_exported_for_texts_of_any_length(texts: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    words = [*SHORT, texts, "task=language_modelling", "model.name=llama", "model.config.num_key_value_heads=2", "updates=2"]
    run = drivetrain.train([*words, "data.packing=true"])
    assert main.main(["export", str(run.run_dir), "model.onnx"]) == 0
    session = onnxruntime.InferenceSession("model.onnx")
    model = drivetrain.load(run.run_dir, ["runtime.device=cpu"]).model
    for length in (3, 17):
        tokens = torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = model(tokens)
        torch.testing.assert_close(
            torch.from_numpy(session.run(None, {"input": tokens.numpy()})[0]), expected, rtol=1e-4, atol=1e-5
        )
