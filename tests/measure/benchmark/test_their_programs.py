"""Training scripts of Lightning and of Hugging Face's Trainer are compared as they are: one rate learns, and one does not."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

DATA = """
import argparse, numpy, torch
from sklearn.datasets import load_digits
words = argparse.ArgumentParser()
words.add_argument("--seed", type=int)
words.add_argument("--lr", type=float)
args = words.parse_args()
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
train, val = order[:1200], order[1200:]
net = lambda: torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
"""
LIGHTNING = """
import lightning as L
L.seed_everything(args.seed)

class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=args.lr)

loader = lambda rows: torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[rows], y[rows]), 64, shuffle=True)
trainer = L.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
model = Digits()
trainer.fit(model, loader(train), loader(val))
trainer.validate(model, dataloaders=loader(val))
"""
TRAINER = """
import tempfile
from transformers import Trainer, TrainingArguments, set_seed
set_seed(args.seed)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, pixels, labels):
        logits = self.net(pixels)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

rows = lambda which: [{"pixels": x[n], "labels": y[n]} for n in which.tolist()]
accuracy = lambda found: {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}
settings = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=3, per_device_train_batch_size=64, learning_rate=args.lr,
                             seed=args.seed, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
trainer = Trainer(Model(), settings, train_dataset=rows(train), eval_dataset=rows(val), compute_metrics=accuracy)
trainer.train()
print(trainer.evaluate())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "script", "rates", "metric"),
    [
        ("lightning", LIGHTNING, (0.001, 0.1), r"val_acc\W+([\d.]+)"),
        ("transformers", TRAINER, (1e-5, 1e-2), r"'eval_accuracy': '?([\d.]+)"),
    ],
)
def test_a_script_is_compared_without_a_change(tmp_path: Path, package, script, rates, metric) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (tmp_path / "train.py").write_text(DATA + script)
    variants = [word for rate in rates for word in ("--variant", f"--lr {rate}")]
    done = subprocess.run(
        [
            sys.executable, "-m", "drivetrain", "compare", "--program", f"{sys.executable} train.py --seed {{seed}} {{variant}}",
            *variants, "--metric", metric, "--higher", "seeds=3", "max_seeds=4",
        ],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    (file,) = tmp_path.rglob("compare.json")
    rows = json.loads(file.read_text())
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "BETTER" in json.dumps(rows)
