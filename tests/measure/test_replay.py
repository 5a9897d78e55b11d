"""An update of a run is made again, exactly, and its samples and layers are looked at."""

import json
import math
import sys
from pathlib import Path

import pytest

import drivetrain
from drivetrain.cli import main
from drivetrain.core.errors import UserError
from drivetrain.measure import replay, replay_cause
from drivetrain.measure.replay import ReplaySettings
from drivetrain.measure.replay_cause import Found, LookedAt
from tests.support.to_end import run_to_end

PLANTED = """
import torch

X = torch.randn(160, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Rows(torch.utils.data.Dataset):
    num_classes = 2

    def __init__(self, split="train", bad=None):
        self.count, self.bad = (128, bad) if split == "train" else (32, None)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        x, y = X[number], Y[number]
        return (x * float("nan") if number == self.bad else x), y


def twice(output, target, model, x):
    return torch.nn.functional.cross_entropy(output, target) + 0 * model(x).sum()
"""
WORDS = (
    "data=own", "trust=[planted_rows]", "data.target=planted_rows.Rows", "data.validation=test", "model=mlp", "model.hidden=[8]",
    "batch.global_batch=8", "runtime.device=cpu", "log_every=1", "epochs=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("replays")
    (place / "planted_rows.py").write_text(PLANTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield place
    sys.modules.pop("planted_rows", None)


@pytest.fixture(scope="module")
def run(place) -> Path:
    saving = ("saving=best", "saving.every_updates=10", "saving.keep_recent=3")
    return drivetrain.train([*WORDS, *saving, "model.dropout=0.2", f"hydra.run.dir={place / 'run'}"]).run_dir


def replayed(run_dir: Path, *words: str, **settings: int) -> Found:
    return replay.replay(run_dir, words, (), ReplaySettings(**settings))[1]


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_that_diverged_names_its_row(place, capsys):
    run = drivetrain.train([*WORDS, "data.kwargs.bad=77", "log_every=5"])
    assert ("why", f"drivetrain replay {run.run_dir} shows the update") in run.rows()
    before = files(run.run_dir)
    assert main.main(["replay", str(run.run_dir)]) == 0
    assert files(run.run_dir) == before
    (file,) = Path("outputs/replay").rglob("replay.json")
    found = json.loads(file.read_text())
    assert (found["cause"]["kind"], found["cause"]["of"], found["samples"][0]["sample"]) == ("sample", "row 77", "row 77")
    assert [sample["largest value"] for sample in found["samples"]].count("not finite") == 1
    assert "row 77" in file.with_suffix(".html").read_text()
    assert "update" in capsys.readouterr().out
    assert len(list(Path("outputs/replay").glob("*/*"))) == 1, "the folder in which it was trained again is gone"


def test_it_begins_at_a_checkpoint_and_computes_the_same_bits(run):
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir())[-3:] == [32, 42, 48]
    found = replayed(run, update=47, back=4)
    assert (found.start, found.same, found.other) == (42, [*range(43, 48)], [])
    assert (found.update, found.earlier, len(found.samples)) == (47, 43, 8)
    mean = sum(sample.loss for sample in found.samples) / 8
    assert mean == pytest.approx(found.history[47]["the loss"], rel=1e-5), "the same dropout"
    assert all(sample.gradient > 0 for sample in found.samples)
    names = [each.what for each in replay_cause.ranges(found.history, 47)]
    assert names.index("output of layers.0.linear") < names.index("output of head") < names.index("gradient of head.weight")


def test_another_run_is_told(run):
    found = replayed(run, "optimizer.lr=0.5", update=47, back=4)
    assert len(found.other) == 4, "of the first the weights were the same"
    assert "explains another run" in replay.sheet_of(found).sections[0].text
    assert replay.sheet_of(found).answer.startswith("update 47 of another run: ")


def test_what_cannot_be_replayed_is_refused(run, refused):
    with pytest.raises(UserError, match="has made 48 updates"):
        replayed(run, update=49)
    for words, says in (([], "was given 0"), (["nowhere"], "nowhere")):
        assert says in refused("replay", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("loss=own", "loss.target=planted_rows.twice"), "planted_rows.twice runs the model more than once"),
        (("loss=supcon",), "loss=supcon compares samples"),
    ],
)
def test_a_loss_that_has_none_of_a_sample_is_named(place, words, says):
    run = drivetrain.train([*WORDS, *words, "updates=4"]).run_dir
    assert any(says in line for line in replayed(run).unseen)


@pytest.mark.slow
def test_a_row_of_any_rank_is_named(place):
    words = ("data.kwargs.bad=77", "parallel=ddp", "parallel.nproc=2", "model.dropout=0.1")
    run = run_to_end([*WORDS, *words], ends="diverged")
    found = replayed(run.run_dir)
    assert replay_cause.cause(found)[:2] == ("sample", "row 77")
    assert len(found.samples) == 8
    assert not found.other


def found_with(losses=(0.5,) * 8, earlier=(0.5,) * 8, loss=0.5, moved=0.001, **sizes: float) -> Found:
    """Twelve updates like each other, and a thirteenth with other sizes."""
    usual = {"output of a": 1.0, "output of b": 2.0, "gradient of b.weight": 0.1, "update of b.weight": moved}
    history = {update: {name: size * (1 + update % 3 / 10) for name, size in usual.items()} for update in range(1, 14)}
    history[13] |= {name.replace("_", " of "): size for name, size in sizes.items()}
    each = enumerate(zip(losses, earlier, strict=True))
    samples = [LookedAt(f"row {n}", 1.0, loss=own, earlier=before) for n, (own, before) in each]
    for update in history:
        history[update]["the loss"] = 0.5 + update % 3 / 100 if update < 13 else loss
    return Found(13, 1, samples, history, [])


@pytest.mark.parametrize(
    ("found", "kind", "of"),
    [
        (found_with(), "none", ""),
        (found_with((9.0, *(0.5,) * 7), (7.0, *(0.5,) * 7), 1.5), "sample", "row 0"),
        (found_with((9.0, *(0.5,) * 7), (0.4, *(0.5,) * 7), 1.5, output_a=9.0), "layer", "a"),
        (found_with((math.nan, *(0.5,) * 7), (math.nan, *(0.5,) * 7), math.nan), "sample", "row 0"),
        (found_with((math.nan,) * 8, (0.5,) * 8, math.nan, output_b=math.inf), "layer", "b"),
        (found_with((9.0,) * 8, (0.5,) * 8, 9.0, moved=0.5, output_a=99.0), "rate", ""),
    ],
)
def test_the_cause_is_judged(found, kind, of):
    assert replay_cause.cause(found)[:2] == (kind, of)
