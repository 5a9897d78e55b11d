"""`drivetrain show`: the drawing is that of the run that the same words train, in the terminal and as a PNG."""

import base64
import io
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from drivetrain.cli import show
from drivetrain.cli.main import main
from drivetrain.cli.show_data import sheet_of
from drivetrain.core.options.horizon import Horizon
from drivetrain.data.digits import DigitScenes
from drivetrain.data.images import ImageFolder
from drivetrain.data.masks import Masks
from drivetrain.launch.job import prepare
from drivetrain.ui import plots
from tests.support import sets
from tests.support.put import put

# Unicode's Braille: the bit of each dot of a character, by row and column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def dots(drawing: str, first: str) -> list[tuple[int, int]]:
    """(column, row) of every dot in the panel whose first line carries the value `first`, from its lower left corner."""
    lines = drawing.splitlines()
    top = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{first}┤"))
    end = next(i for i in range(top, len(lines)) if "└" in lines[i])
    rows = [line[plots.LABEL_WIDTH + 1 :].rstrip("│") for line in lines[top:end]]
    height = 4 * len(rows) - 1
    return [
        (2 * column + x, height - (4 * row + y))
        for row, cells in enumerate(rows)
        for column, cell in enumerate(cells)
        for y in range(4)
        for x in range(2)
        if 0x2800 <= ord(cell) <= 0x28FF and (ord(cell) - 0x2800) & DOTS[y][x]
    ]


def test_a_straight_line_is_drawn_straight():
    curve = plots.Curve("lr", [(u, 1 - u / 100) for u in range(101)], 0.0, 1.0)
    drawing = plots.text([curve], Horizon(100, range(10, 101, 10)), width=70)
    drawn = dots(drawing, "1")
    across, up = 2 * 60 - 1, 4 * 10 - 1
    assert len({x for x, _ in drawn}) == 120  # no gap
    assert all(abs(y / up - (1 - x / across)) < 1.5 / up for x, y in drawn)
    assert all(len(line) <= 70 for line in drawing.splitlines())


def test_the_axes_say_updates_and_epochs_where_they_are():
    drawing = plots.text([plots.Curve("lr", [(0, 1.0), (99, 1.0)], 0.0, 1.0)], Horizon(100, range(10, 101, 10)), width=110)
    lines = drawing.splitlines()
    assert [line.split()[0] for line in (lines[0], lines[-1])] == ["epoch", "lr"]
    assert lines[-1].split() == ["lr", "update"]
    for labels, frame, tick in ((lines[1], lines[2], "┴"), (lines[-2], lines[-3], "┬")):
        marks = [c for c, mark in enumerate(frame) if mark == tick]
        assert len(marks) == len(labels.split()) == 6
        at = [labels.index(n) + len(n) // 2 for n in labels.split()]
        assert all(abs(a - b) <= 1 for a, b in zip(marks, at, strict=True))
        assert all(abs(b - a - 20) <= 1 for a, b in pairwise(marks)), "a fifth of 100 columns"
    assert lines[1].split() == ["0", "2", "4", "6", "8", "10"]
    assert lines[-2].split() == ["0", "20", "40", "60", "80", "100"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [(0.4, [0]), (1, [0, 1]), (15, list(range(0, 15, 2))), (165, [0, 50, 100, 150]), (90, list(range(0, 90, 20)))],
)
def test_ticks_are_round(end, expected):
    assert plots.whole_ticks(end) == expected


def test_what_is_drawn_is_what_is_trained(make, each_update, tiny, says):
    words = ["scheduler=onecycle", "scheduler.momentum=[0.8,0.9]", "batch.lr_scaling=linear", "epochs=4", "updates=null"]
    trainer = make(*words)
    group = trainer.optimizer.param_groups[0]
    used: list[tuple[float, float]] = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda: (used.append((group["lr"], group["momentum"])), step())
    trainer.fit()
    job = show.prepare(tiny(*words))
    rates, momenta = show._curves(job.run, show._horizon(job.run))
    assert len(used) == 16
    assert [value for _, value in rates.points] == pytest.approx([lr for lr, _ in used])
    assert [value for _, value in momenta.points] == pytest.approx([m for _, m in used])

    drawing = says("show", *tiny(*words))
    assert "16 updates, 4 an epoch" in drawing
    peak = max(dots(drawing, f"{rates.high:.3g}"), key=lambda dot: dot[1])[0]
    trough = min(dots(drawing, "0.9"), key=lambda dot: dot[1])[0]
    assert abs(peak - trough) <= 6  # momentum is low where the rate is high


def test_stages_have_a_line_each_and_their_own_learning_rate(says, tiny):
    words = tiny("epochs=4", "updates=null", "stages=[{until: 1ep, batch.global_batch: 24}, {until: 0.5, optimizer.lr: 0.2}]")
    job = show.prepare(words)
    (rates,) = show._curves(job.run, show._horizon(job.run))
    assert [value for _, value in rates.points] == [0.05] * 2 + [0.2] * 4 + [0.05] * 8
    printed = says("show", *words)
    for line in (
        "stage 1  updates 0 to 2, until 1ep: batch.global_batch=24",
        "stage 2  updates 2 to 6, until 0.5: optimizer.lr=0.2",
        "stage 3  updates 6 to 14, to the end: the config of the run",
    ):
        assert line in printed


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["scheduler=plateau", "scheduler.patience=0"], 0, "evaluations stop improving"),  # no drawing can know it
        (["scheduler=constant", "scheduler.warmup=50"], 0, "never reaches optimizer.lr"),
        (["scheduler=cosine", "scheduler.warmup=x"], 2, "is no length"),
        (["debug=fast", "debug.updates=4", "data.samples=96", "updates=null"], 0, "4 updates, 8 an epoch"),
    ],
)
def test_remarks_are_made_and_problems_refused(words, code, says, capsys, tiny):
    assert main(["show", *tiny(*words)]) == code
    assert says in "".join(capsys.readouterr())


def test_data_that_must_be_read_is_read(monkeypatch, says, tiny):
    from drivetrain.data.synthetic import Synthetic

    monkeypatch.setattr(Synthetic, "train_samples", lambda self: None)
    assert "12 updates, 4 an epoch" in says("show", *tiny("updates=null", "epochs=3"))


def test_epochs_that_get_shorter_are_marked_where_they_end(says):
    lines = says("show", "model=mlp", "epochs=6", "batch.grow_every=2").splitlines()
    assert "28 updates, 8 an epoch at first" in lines[0]
    marks = [c for c, mark in enumerate(lines[3]) if mark == "┴"]
    widths = [b - a for a, b in pairwise(marks)]
    assert len(widths) == 6
    assert min(widths[:2]) > max(widths[2:4]) > max(widths[4:])


def test_no_update_at_all_is_said_and_the_data_are_told_where_they_are_asked_for(tmp_path, capsys, tiny, refused):
    said = (
        "batch.global_batch=96 is more than the 48 training samples, so no update is made: set batch.global_batch to 48 or less"
    )
    for words, code in ([], 0), (["--png", str(tmp_path / "curve.png")], 2):
        assert main(["show", *tiny("batch.global_batch=96"), *words]) == code
        told = capsys.readouterr()
        assert ("What was read" in told.out, f"no learning rate is drawn: {said}" in told.out) == (not code, not code)
        assert (said in told.err) == bool(code)
    assert "batch.global_batch=9999 is more than the" in refused("show", "batch.global_batch=9999")  # nothing else was asked for


def test_a_png(tmp_path, tiny, says, monkeypatch, refused):
    pytest.importorskip("matplotlib")
    file = tmp_path / "schedule.png"
    assert str(file) in says("show", *tiny("scheduler=onecycle", "scheduler.momentum=[0.85,0.95]"), "--png", file)
    with Image.open(file) as image:
        assert (image.format, image.width) == ("PNG", 1200)
        blue = sum(1 for r, g, b, _ in image.convert("RGBA").getdata() if b > r + 60 and b > 120)
    assert blue > 1000  # there is a curve in it
    nowhere = refused("show", *tiny(), "--png", tmp_path / "nowhere" / "x.png")
    assert "cannot be written: No such file or directory" in nowhere
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'drivetrain[plots]'" in refused("show", *tiny(), "--png", "x.png")


def picture_of(page: Path) -> np.ndarray:
    """The picture in a page, without the margin around its first tile."""
    content = re.search(r"data:image/png;base64,([^\"]+)", page.read_text())[1]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))[8:, 8:]


def test_the_data_of_training_is_drawn_beside_what_augmentation_makes_of_it(tmp_path, says):
    noise, root = np.random.default_rng(0), tmp_path / "set"
    for n in range(40):
        file = root / "ab"[n % 2] / f"{n}.png"
        put(file, Image.fromarray(noise.integers(0, 255, (96, 96, 3), dtype=np.uint8)))
    words = ["data=imagefolder", f"data.root={root}", "data.size=96", "data.holdout=0.3", "augment=[flip_crop]"]
    told = says("show", *words, "--data", tmp_path / "page.html")
    assert "inputs: images of 96×96, as 96×96" in told
    assert "no learning rate is drawn: batch.global_batch=" in told
    told = says("show", *words, "batch.global_batch=8")  # where an override names the data they are told too
    assert "inputs: images of 96×96, as 96×96" in told
    assert "lr: " in told
    assert "What was read" not in says("show", "batch.global_batch=8")
    data = ImageFolder(root=str(root), size=96, holdout=0.3).load_sets(torch.device("cpu"))
    drawn, first = picture_of(tmp_path / "page.html"), data.train.fetch(torch.tensor([0]))[0][0].permute(1, 2, 0).numpy()
    assert np.array_equal(drawn[:96, :96], first)
    moved = drawn[:96, 100:196]
    assert not np.array_equal(moved, first)
    assert abs(float(moved.mean()) - float(first.mean())) < 10


def test_masks_are_drawn_over_their_images(tmp_path):
    sets.write(tmp_path, 96, 30, with_hub=False)
    words = [
        "task=segmentation",
        "data=masks",
        f"data.root={tmp_path / 'masked'}",
        "data.size=96",
        "data.holdout=0.3",
        "augment=[]",
    ]
    assert main(["show", *words, "augment=[]", "--data", str(tmp_path / "page.html")]) == 0
    splits = Masks(root=str(tmp_path / "masked"), size=96, holdout=0.3).load_sets(torch.device("cpu"))
    x, y = splits.train.fetch(torch.tensor([0]))
    drawn = picture_of(tmp_path / "page.html")[:96, :96]
    plain, same = x[0].permute(1, 2, 0).numpy(), (y[0] == 0).numpy()
    assert np.array_equal(drawn[same], plain[same])
    assert not (drawn[~same] == plain[~same]).all(-1).any()


def shown(*words: str) -> dict[str, Any]:
    return sheet_of(prepare(["model=mlp", *words]).run).as_dict()


def test_each_column_of_a_table_is_shown_as_what_it_became(tmp_path):
    head, rows = ",age,heating,sold,price,code,note,empty", []
    for n in range(60):
        rows.append(f'{n},{n if n else ""},{["gas", "oil"][n % 2]},2024-0{1 + n % 9}-11,"{100 + n},000",{n % 3:03},t{n},')
    (tmp_path / "houses.csv").write_text("\n".join([head, *rows]))
    words = ["data=tabular", f"data.path={tmp_path}/houses.csv", "data.target=heating", "data.columns=[note:unused,*]"]
    rows = shown(*words, "data.missing=fill", "data.decimal=.", "task=classification")["columns"]
    assert ("age", "number", "1 to 59, mean 30", "1", "1, 2, 3") in [tuple(row.values()) for row in rows]
    assert {row["column"]: row["became"] for row in rows} == {
        "(column 1)": "left out: it has no name: an index", "age": "number", "heating": "the target, 2 classes",
        "sold": "a date (year, month, day, weekday)", "price": "number, written as 1,234.5", "code": "3 categories",
        "note": "left out: not asked for (data.columns)", "empty": "left out: it has no value",
    }  # fmt: skip
    values = {row["column"]: row["values"] for row in rows}
    assert [row["examples"] for row in rows if row["column"] == "price"] == ["100,000, 101,000, 102,000"]
    assert values["heating"] == "gas 50 %, oil 50 %"
    assert values["sold"] == "2024-01-11 to 2024-09-11"
    assert values["code"] == "000 33.3 %, 001 33.3 %, 002 33.3 %"


def test_texts_are_shown_with_their_lengths_and_targets(tmp_path):
    lines = [json.dumps({"text": f"é{'a' * (n % 9)} {n}", "label": ["good", "bad"][n % 2]}) for n in range(60)]
    for name, content in {"texts": lines, "test": ['{"text": "new", "label": "bad"}', *lines[:3]]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(content))
    words = ["data=jsonl", f"data.path={tmp_path}/texts.jsonl", f"data.test={tmp_path}/test.jsonl", "data.length=8", "model=gpt"]
    found = shown(*words, "data.label=label", "task=classification", "data.validation=null")
    assert [row["samples"] for row in found["samples"]] == ["60", "4"]
    assert [(row["samples"], row["longest"]) for row in found["lengths"]] == [("60", "8"), ("4", "6")]
    first = found["samples of training"][0]
    assert first == {"sample": "0", "text": "é 0", "tokens": "4", "target": "good"}
    tokens = shown(*words, "task=language_modelling", "data.validation=null")["samples of training"][0]
    assert (tokens["text"], tokens["target"]) == ("é", "the next token")
    (tmp_path / "chats.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{n}?", "completion": f"it is {n}"}) for n in range(60))
    )
    words = ["task=instruction", "model=gpt", f"data.path={tmp_path}/chats.jsonl", "data.length=64"]
    assert re.fullmatch(r"the next token of 'it is \d+.*'", shown(*words)["samples of training"][0]["target"])


def test_what_is_twice_and_what_cannot_be_read_is_said(tmp_path, capsys):
    for n in range(20):
        for place in (f"train/{'ab'[n % 2]}", *([f"test/{'ab'[n % 2]}"] if n < 4 else [])):
            (tmp_path / place).mkdir(parents=True, exist_ok=True)
            kind = "L" if n % 2 else "RGB"
            Image.new(kind, (9 + n, 8), 10 * n if n % 2 else (10 * n, 7, 7)).save(tmp_path / place / f"{n}.png")
    (tmp_path / "train/a/x.png").write_bytes(b"none")
    words = ["data=imagefolder", f"data.root={tmp_path}", "data.size=8", "data.on_error=skip", "data.verify=0", "augment=[]"]
    sheet = sheet_of(prepare([*words, "data.validation=null"]).run)
    sheet.show()
    said = capsys.readouterr().out
    assert "in training too: 4 of the 4 samples of test" in said
    assert f"1 of 21 files of training cannot be read, the first: {tmp_path}/train/a/x.png" in said
    files = {row["kind"]: (row["files"], row["width"], row["height"]) for row in sheet.as_dict()["files"]}
    assert files == {"PNG RGB": ("10", "9 to 27", "8"), "PNG L": ("10", "10 to 28", "8")}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["data=synthetic", "data.shape=[7]"], {"x": "(n, 7)", "y": "(n,)"}),
        (["data=wine", "task=classification"], {"x": "(n, 13)", "y": "(n,)"}),
    ],
)
def test_what_is_no_picture_and_no_text_is_shown_as_numbers(words, parts):
    assert {row["part"]: row["shape"] for row in shown(*words)["samples of training"]} == parts


def test_samples_with_each_of_several_labels_are_counted():
    (train, _, test) = shown("data=digit_scenes", "task=multilabel", "model=resnet9")["samples"]
    y = DigitScenes(kind="labels").load(torch.device("cpu")).test.y
    assert [int(test[str(digit)]) for digit in range(10)] == y.sum(0).int().tolist()
    assert train["samples"] == "1,800"


def test_it_says_what_the_options_claim_of_training(says):
    exact, close, changes = says("show", "precision=bf16", "surgery=[channels_last]", "augment=[flip_crop]").splitlines()[-3:]
    assert exact.split()[0] == "exact"
    assert {"loader=sync", "saving=last"} < set(exact.split())
    assert close.split() == ["close", "surgery=[channels_last]", "precision=bf16"]
    assert {"optimizer=adamw", "augment=[flip_crop]"} < set(changes.split())
    assert "clip=none" not in changes
