"""The rules of docs/design-pages.md, read from the HTML and the style sheet. test_pages_in_a_browser.py looks at the pages."""

import itertools
import json
import math
import re

import pytest

from drivetrain.core import files
from drivetrain.run import reader
from drivetrain.ui.pages import charts, run, style
from drivetrain.ui.pages.charts import Axis, Curve
from tests.support import made_pages, pages


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return made_pages.every(tmp_path_factory.mktemp("pages"))


NAMES = ["run", "failed run", "report", "compare", "ablate", "tune", "doctor", "bisect", "certify"]


@pytest.mark.parametrize("name", NAMES)
def test_every_page_answers_first_and_keeps_the_rules(made, name):
    page = pages.check(made[name])
    assert len(made[name]) < 100_000  # nothing large is in the file
    assert "alert(1)" in made[name]  # what came from outside is there, as text
    assert "<!--<script>" in "".join(text for _, text in page.texts)
    assert "\u202e" not in made[name]
    assert "\x1b" not in made[name]
    assert page.all("table")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("run", "mlp on digits reached accuracy 0.6988 on the test set and 0.6988 on the validation set after 4 epochs "
                "(40 updates) in 41 s with the start; the run completed."),
        ("report", "Of 3 runs, optimizer.lr=0.3 is the best: it reached accuracy 1.0000 on the validation set, and the worst "
                   "0.1131."),
        ("compare", "precision=bf16 surgery=[channels_last] is 1.41 × as fast as precision=fp32 surgery=[] (1.30 to 1.50), and "
                    "its result is no worse."),
        ("doctor", "The step waits for data 20% of its time; precision=bf16 surgery=[channels_last] makes it 1.41 × as fast "
                   "(1.30 to 1.50)."),
    ],
)  # fmt: skip
def test_the_first_line(made, name, answer):
    assert pages.Page(made[name]).texts[0] == ("h1", answer)


def test_the_time_of_a_resumed_run_is_told_as_that_of_its_last_part(tmp_path):
    folder = made_pages.run_folder(tmp_path / "run", 0.1, "completed")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"resumed_at": 30}))
    assert "(40 updates), of which those since 30 took 41 s with the start" in run.verdict(reader.read(folder))


@pytest.mark.parametrize(
    ("status", "words"),
    [("diverged", "diverged after 4 epochs"), ("interrupted", "was interrupted after"), ("failed", "failed after")],
)
def test_a_run_that_did_not_complete_says_so_first(tmp_path, status, words):
    verdict = run.verdict(reader.read(made_pages.run_folder(tmp_path / "run", 0.1, status)))
    assert words in verdict
    assert "<!--<script>" in verdict  # its error


def test_a_run_under_way_and_a_killed_one(tmp_path):
    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    (folder / "result.json").unlink()
    said = "mlp on digits was killed after update 40, with accuracy 0.9817 at best on the validation set"
    assert run.verdict(reader.read(folder)) == said
    (folder / "result.json").write_text("{")
    assert "left a result.json that cannot be read" in run.verdict(reader.read(folder))


def test_the_end_of_a_run_draws_short_records_only(tmp_path, monkeypatch):
    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    assert run.leave(folder) == folder / "report.html"
    (folder / "report.html").unlink()
    monkeypatch.setattr(run, "MOST_AT_END", 10)
    assert run.leave(folder) is None
    assert not (folder / "report.html").exists()


def test_a_full_disk_loses_the_page_and_not_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space")

    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    monkeypatch.setattr(files, "write_bytes", full)
    assert run.leave(folder) is None


def test_the_page_says_what_differs_from_the_default(tmp_path):
    page = run.sheet_of(reader.read(made_pages.run_folder(tmp_path / "run", 0.1))).page()
    rows = re.findall(r'<tr><th scope="row">([\w.]+)</th><td class="text">([^<]*)</td><td class="text">([^<]*)</td></tr>', page)
    assert ("model", "mlp", "resnet9") in rows
    assert ("optimizer.lr", "0.1", "0.003") in rows
    assert ("epochs", "4", "15") in rows


@pytest.mark.parametrize(("saving", "best_at", "kept"), [("last", 30, False), ("last", 40, True), ("best", 30, True)])
def test_the_page_has_a_best_checkpoint_only_where_it_was_kept(tmp_path, saving, best_at, kept):
    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    result = json.loads((folder / "result.json").read_text())
    result["metrics"]["validation"]["best"]["update"] = best_at
    (folder / "result.json").write_text(json.dumps(result))
    recipe = (folder / "recipe.yaml").read_text().replace("[{override", f"[{{override /saving: {saving}}}, {{override", 1)
    (folder / "recipe.yaml").write_text(recipe)
    page = run.sheet_of(reader.read(folder)).page()
    assert ("best checkpoint" in page) == kept
    assert ("<tr class=winner>" in page) == kept


# --- charts ---


def points_of(chart):
    return [tuple(map(float, pair.split(","))) for pair in re.search(r'points="(.*?)"', chart)[1].split()]


def test_a_logarithmic_axis_gives_each_decade_the_same_room():
    chart = charts.curves("loss", [Curve("a", [(n, 10.0**-n) for n in range(4)])], log=True)
    heights = [y for _, y in points_of(chart)]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.2)
    assert ">0.01<" in chart
    assert "between 0.001 and 1" in re.search(r'aria-label="(.*?)"', chart)[1]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "values",
    [
        [1e308, -1e308],
        [5e-324, 1.0],
        [1.0, 1.0 + 2e-16],
        [0.0, 0.0],
        [math.nan, 1.0],
        [math.inf, 2.0],
        [1e-99, 1e99],
        [3, 2**900],
    ],
)
def test_values_of_a_spoilt_file_do_not_spoil_the_chart(values, log):
    chart = charts.curves("loss", [Curve("a", list(enumerate(values, 1)))], log=log)
    assert not re.search(r'="[^"]*\b(inf|nan)\b', chart)


def test_no_points_no_chart():
    assert charts.curves("loss", [Curve("a", [])]) == ""
    assert charts.grid(["", ""]) == ""


def test_a_long_curve_keeps_its_end():
    long = points_of(charts.curves("loss", [Curve("a", [(float(n), float(n)) for n in range(10_001)])]))
    assert len(long) <= charts.MAX_POINTS + 2
    assert long[-1][0] == charts.WIDTH - charts.RIGHT


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [(0.0, 1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (1e-4, 1e-1, True, [1e-4, 1e-3, 1e-2, 1e-1]), (3e-9, 4e-9, False, None)],
)
def test_ticks_are_round(low, high, log, expected):
    found = charts.ticks(Axis(low, high, 0, 100, log))
    assert 3 <= len(found) <= 7
    assert all(low <= tick <= high * 1.001 for tick in found)
    if expected is not None:
        assert set(map(float, expected)) & {round(tick, 9) for tick in found} >= set(map(float, expected[:1]))


def test_the_script_can_read_an_axis():
    assert json.loads(Axis(0.5, 2.0, 0, 10, True).data().replace("&quot;", '"')) == [0.5, 2.0, 0, 10, 1]


# --- colours ---


def luminance(colour):
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [style._LIGHT, style._DARK], ids=["light", "dark"])
def test_contrast_is_that_of_wcag_aa(scheme):
    colours = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
    for ground in ("ground", "raised", "win"):
        for text in ("ink", "soft", "mark", "good", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    for n in range(charts.COLOURS):
        assert contrast(colours[f"s{n}"], colours["ground"]) >= 3, n
