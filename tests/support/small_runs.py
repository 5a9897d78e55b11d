"""Small runs that leave, between them, every kind of file that a run can leave; and what is read from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

SHORT = (
    "optimizer=adamw", "batch.global_batch=12", "updates=4", "log_every=1", "saving.every_updates=2", "ema=post_hoc",
    "ema.snapshots=2",
)  # fmt: skip
RUN = (
    *SHORT, "data=synthetic", "data.shape=[1,2,2]", "data.classes=3", "data.samples=24", "data.test_samples=6", "model=mlp",
    "model.hidden=[4]",
)  # fmt: skip
OF_TABLE = (*SHORT, "data=tabular", "data.target=kind", "data.holdout=0.3", "model=mlp", "model.hidden=[4]")
OF_TEXTS = (
    *SHORT, "data=jsonl", "data.holdout=0.3", "data.length=8", "data.tokenizer=bpe", "data.vocabulary=270", "loss=next_token",
    "model=gpt", "model.width=8", "model.depth=1", "model.heads=2",
)  # fmt: skip
AVERAGE = 0.07  # a width between those that are stored


class SmallRun(NamedTuple):
    """A run of four updates with two checkpoints, and an input of its model."""

    run_dir: Path
    input: Any

    def moved(self, run_dir: Path) -> SmallRun:
        """The same for a copy of the run's directory."""
        return self._replace(run_dir=run_dir)

    def predictions(self) -> str:
        """A hash of what the model predicts for the input, with an average that is made of the files of averages."""
        import drivetrain

        output = drivetrain.load(self.run_dir, average=AVERAGE).predict(self.input).output
        return hashlib.sha256(output.numpy().tobytes()).hexdigest()

    def trackers(self) -> dict[str, str]:
        """The ids of the run's trackers."""
        from drivetrain.logger import base

        return base.known_ids(self.run_dir / base.RUNS)


def pictures(folder: Path) -> SmallRun:
    """A run on synthetic images, which a tracker follows."""
    from drivetrain.logger import base

    run = _train(RUN, folder)
    base.write_ids(run / base.RUNS, {"mlflow": "0a1b2c3d", "wandb": "5e6f7a8b"})
    return SmallRun(run, [[[0.5, -1.0], [2.0, 0.25]]])


def table(folder: Path) -> SmallRun:
    """A run on a table with a column of numbers and one of categories."""
    file = folder / "table.csv"
    file.write_text("x,y,kind\n" + "".join(f"{n * 0.5},{'abc'[n % 3]},{'uv'[n % 2]}\n" for n in range(60)))
    return SmallRun(_train((*OF_TABLE, f"data.path={file}"), folder), str(file))


def texts(folder: Path) -> SmallRun:
    """A run on texts with a trained tokenizer."""
    file = folder / "texts.jsonl"
    lines = [f"the {'cat' if n % 2 else 'dog'} number {n} sat" for n in range(40)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return SmallRun(_train((*OF_TEXTS, f"data.path={file}"), folder), "the cat number 9")


def _train(words: tuple[str, ...], folder: Path) -> Path:
    import drivetrain

    result = drivetrain.train([*words, f"output_dir={folder}/outputs"])
    if result.status != "completed":
        raise RuntimeError(f"a small run ended as {result.status}: {result.error}")
    return Path(str(result.run_dir))
