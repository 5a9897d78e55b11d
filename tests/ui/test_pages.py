"""Pages and sheets by the rules of docs/design-pages.md: their HTML, their other forms, and pages as Chromium shows them."""

import csv
import html
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

import drivetrain
from drivetrain.core.machine import files
from drivetrain.core.machine.csv_rows import spreadsheet
from drivetrain.run import reader
from drivetrain.ui import output, sheet
from drivetrain.ui.pages import charts, runs, style
from drivetrain.ui.pages.charts import Axis, ChartLine
from drivetrain.ui.pages.run_table import verdict
from drivetrain.ui.sheet import Drawn, PagePart, Sheet, Table, commands, folded, heading, remarks, words
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


@pytest.mark.parametrize(
    ("status", "resumed_at", "words"),
    [
        ("completed", 30, "(40 updates); those since 30 took 41 s with the start"),  # the last part's time
        ("completed", 40, "after 4 epochs (40 updates); the run completed"),
        ("diverged", None, "diverged after 4 epochs"),
        ("interrupted", None, "was interrupted after"),
        ("failed", None, "failed after"),
    ],
)
def test_how_a_run_ended_is_said_first(tmp_path, status, resumed_at, words):
    folder = made_pages.run_folder(tmp_path / "run", 0.1, status)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"resumed_at": resumed_at}))
    answer = verdict([reader.read(folder)])
    assert words in answer
    assert ("<!--<script>" in answer) == (status != "completed")  # its error


def test_a_run_under_way_and_a_killed_one(tmp_path):
    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    (folder / "result.json").unlink()
    said = "mlp on digits was killed after update 40, with accuracy 0.9817 at best on the validation set"
    assert verdict([reader.read(folder)]) == said
    (folder / "result.json").write_text("{")
    assert "left a result.json that cannot be read" in verdict([reader.read(folder)])


def test_of_many_runs_five_at_most_have_a_colour_and_stand_in_one_key(tmp_path):
    rates = [0.001, 0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    many = [reader.read(made_pages.run_folder(tmp_path / f"run{n}", rate)) for n, rate in enumerate(rates)]
    for count in (3, len(many)):
        page = runs.sheet_of(many[:count]).page()
        (key,) = re.findall('<ul class="key">.*?</ul>', page)
        named = re.findall("</svg>(.*?)</li>", key)
        (first_chart, *_) = re.findall('<figure class="over0">.*?</figure>', page)
        lines = re.findall(r'<polyline class="curve ([^"]*)" data-name="([^"]*)"', first_chart)
        coloured = [name for style, name in lines if style != "faint"]
        assert coloured == named  # by the same numbers, and so colours
        assert len(lines) == count
        assert len(coloured) <= runs.MOST_NAMED
        best = max(many[:count], key=lambda run: run.best())
        assert {"optimizer.lr=0.001", f"optimizer.lr={best.config['optimizer.lr']}"} <= {*coloured}  # the first, and the best
    assert f"faint: {len(many) - len(coloured)} others" in page


def test_a_run_of_a_program_with_objects_is_not_said_to_be_a_commands(tmp_path):
    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "overrides": ["model=own", "model.target=given.Net"]}))
    page = runs.sheet_of([reader.read(folder)]).page()
    assert "Only its own program can: model.target=given.Net" in page
    assert "recipe.yaml" not in page.partition("How to reproduce it")[2]


def test_the_end_of_a_run_draws_short_records_only_and_a_full_disk_loses_the_page_alone(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "no space")

    folder = made_pages.run_folder(tmp_path / "run", 0.1)
    assert runs.write(folder) == folder / "report.html"
    (folder / "report.html").unlink()
    monkeypatch.setattr(files, "write_bytes", full)
    assert runs.write(folder) is None
    monkeypatch.undo()
    monkeypatch.setattr(runs, "MOST_AT_END", 10)
    assert runs.write(folder) is None
    assert not (folder / "report.html").exists()


def test_the_page_says_what_differs_from_the_default(tmp_path):
    page = runs.sheet_of([reader.read(made_pages.run_folder(tmp_path / "run", 0.1))]).page()
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
    page = runs.sheet_of([reader.read(folder)]).page()
    assert ("best checkpoint" in page) == kept
    assert ("<tr class=winner>" in page) == kept


# --- charts ---


def points_of(chart):
    return [tuple(map(float, pair.split(","))) for pair in re.search(r'points="(.*?)"', chart)[1].split()]


def test_a_logarithmic_axis_gives_each_decade_the_same_room():
    chart = charts.curves("loss", [ChartLine("a", [(n, 10.0**-n) for n in range(4)])], log=True)
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
    chart = charts.curves("loss", [ChartLine("a", list(enumerate(values, 1)))], log=log)
    assert not re.search(r'="[^"]*\b(inf|nan)\b', chart)


def test_no_points_no_chart():
    assert charts.curves("loss", [ChartLine("a", [])]) == ""
    assert charts.grid(["", ""]) == ""


def test_a_long_curve_keeps_its_end():
    long = points_of(charts.curves("loss", [ChartLine("a", [(float(n), float(n)) for n in range(10_001)])]))
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


# --- every page in headless Chromium, at three widths, light and dark: what a reader would see, measured in the browser ---


WIDTHS = (400, 800, 1400)
SEEN, HIDDEN = 60, 15  # of 255 levels between a thing and its ground
BROWSER = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000"]

# Measures a page of one width, in a frame that this script can look into.
MEASURE = """
function rgb(text) { const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  c.fillStyle = text; c.fillRect(0, 0, 1, 1); return c.getImageData(0, 0, 1, 1).data; }
function over(top, below) { const a = top[3] / 255; return [0, 1, 2].map(n => top[n] * a + below[n] * (1 - a)); }
function luminance(c) { const l = [0, 1, 2].map(n => { const v = c[n] / 255;
  return v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; }); return .2126 * l[0] + .7152 * l[1] + .0722 * l[2]; }
function contrast(a, b) { const [low, high] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  return (high + .05) / (low + .05); }
function measure(frame) {
  const doc = frame.contentDocument, win = frame.contentWindow, root = doc.documentElement, faults = [];
  for (const details of doc.querySelectorAll('details')) details.open = true;
  if (root.scrollWidth > root.clientWidth) faults.push('the page is wider than the window: ' + root.scrollWidth);
  const base = rgb(win.getComputedStyle(doc.body).backgroundColor);
  const ground = at => { const layers = []; for (let e = at; e; e = e.parentElement) layers.unshift(e);
    return layers.reduce((below, e) => over(rgb(win.getComputedStyle(e).backgroundColor), below), over(base, [255, 255, 255])); };
  let texts = 0;
  const walker = doc.createTreeWalker(doc.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, of = node.parentElement, style = win.getComputedStyle(of);
    const drawn = of.namespaceURI.endsWith('svg');
    if (!node.data.trim() || ['SCRIPT', 'STYLE', 'TITLE', 'title'].includes(of.tagName) || !of.getClientRects().length) continue;
    texts++;
    const colour = drawn ? style.fill : style.color, below = ground(of);
    const found = contrast(over(rgb(colour), below), below);
    if (found < 4.5) faults.push('contrast ' + found.toFixed(2) + ' of "' + node.data.trim().slice(0, 30) + '"');
    const svg = of.ownerSVGElement, scale = drawn ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    const size = scale * parseFloat(style.fontSize);
    if (size < 9.5) faults.push('text of ' + size.toFixed(1) + ' pixels: ' + node.data.trim().slice(0, 30));
    const range = doc.createRange(); range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!of.closest('.wide') && (box.right > root.clientWidth + 1 || box.left < -1))
      faults.push('cut off: ' + node.data.slice(0, 30));
  }
  for (const svg of doc.querySelectorAll('figure svg[role=img]')) {
    const labels = [...svg.querySelectorAll('text')].map(t => t.getBoundingClientRect()).filter(b => b.width);
    labels.forEach((a, n) => labels.slice(n + 1).forEach(b => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        faults.push('labels lie on each other: ' + svg.closest('figure').textContent.slice(0, 40)); }));
  }
  const said = doc.querySelector('h1').getBoundingClientRect();
  if (said.top > 60) faults.push('the answer is not at the top');
  const row = doc.querySelector('.winner');
  if (row && contrast(ground(row.children[0]), base) < 1.02) faults.push('the winner does not stand out');
  const buttons = [...doc.querySelectorAll('th[aria-sort] button')].filter(each => each.offsetParent);  // of what a phone shows
  for (const button of buttons) { button.focus(); if (doc.activeElement != button) faults.push('a header takes no focus'); }
  let sorted = 0;
  for (const button of buttons.slice(0, 40)) {
    const head = button.closest('th'), body = head.closest('table').tBodies[0];
    button.click();
    if (head.ariaSort != 'ascending') faults.push('not sorted: ' + button.textContent);
    const texts = [...body.rows].map(r => r.cells[head.cellIndex].textContent.replace(/,/g, ''));
    const cells = texts.map(parseFloat).filter(v => !isNaN(v));
    if (cells.some((v, n) => n && v < cells[n - 1])) faults.push('wrong order: ' + button.textContent + ' ' + cells);
    sorted++;
  }
  const choice = doc.querySelector('.over input:last-of-type');
  if (choice) { choice.click();
    const shown = [...doc.querySelectorAll('.over figure')].filter(f => f.getClientRects().length);
    if (!shown.length || shown.some(f => f.className != 'over' + choice.value))
      faults.push('the choice of the axis does nothing'); }
  const dark = win.matchMedia('(prefers-color-scheme: dark)').matches;
  return {width: win.innerWidth, dark, texts, sorted, faults: [...new Set(faults)]};
}
onload = () => document.body.append(Object.assign(document.createElement('pre'), {id: 'found',
  textContent: JSON.stringify([...document.querySelectorAll('iframe')].map(measure))}));
"""


def frames(page: str) -> str:
    return "<!doctype html><meta charset=utf-8><style>body{margin:0}iframe{border:0;height:6000px}</style>" + "".join(
        f'<iframe style="width:{width}px" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS
    )


def chromium(*arguments: str) -> str:
    assert BROWSER is not None
    return subprocess.run(
        [BROWSER, *FLAGS, *arguments], capture_output=True, text=True, timeout=300, check=True, encoding="utf-8"
    ).stdout


def scheme_flag(scheme: str) -> str:
    return f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"


def picture_of(page: str, scheme: str, file: Path) -> Path:
    """A picture of a page at all widths, beside each other, as a reader opens it."""
    wrapper = file.with_suffix(".html")
    wrapper.write_text(frames(page), encoding="utf-8")
    chromium(scheme_flag(scheme), "--window-size=2700,1500", f"--screenshot={file}", wrapper.as_uri())
    return file


def edges(picture: np.ndarray) -> np.ndarray:
    """The difference of the levels within each block of 4 x 4 pixels."""
    height, width = (n // 4 for n in picture.shape)
    blocks = picture[: 4 * height, : 4 * width].reshape(height, 4, width, 4).astype(int)
    return blocks.max(axis=(1, 3)) - blocks.min(axis=(1, 3))


def vanishing(page: str, folder: Path, name: str) -> int:
    """The number of blocks that show something in one of the two schemes and not in the other."""
    from PIL import Image

    shown = {}
    for scheme in ("light", "dark"):
        with Image.open(picture_of(page, scheme, folder / f"{name} {scheme}.png")) as image:
            whole, left = np.asarray(image.convert("L")), 0
        for width in WIDTHS:
            ground = int(np.bincount(whole[:, left : left + width].ravel()).argmax())
            assert (ground < 60) == (scheme == "dark"), (name, width, ground)
            left += width
        shown[scheme] = edges(whole)
        assert (shown[scheme] > SEEN).sum() > 1000, (name, scheme)
    light, dark = shown["light"], shown["dark"]
    return int(((light > SEEN) & (dark < HIDDEN) | (dark > SEEN) & (light < HIDDEN)).sum())


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: nobody has looked at the pages")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_readable_at_three_widths(made, tmp_path, name, scheme):
    folder = Path(os.environ.get("DRIVETRAIN_KEEP_PAGES", tmp_path))
    wrapper = folder / f"{name} {scheme}.html"
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', made[name])[0]
    wrapper.write_text(f"{frames(made[name])}<script>{MEASURE}</script>", encoding="utf-8")
    assert "default-src 'none'" in policy
    dumped = chromium(scheme_flag(scheme), "--dump-dom", wrapper.as_uri())
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', dumped, re.S)[1]))
    assert [each["width"] for each in found] == list(WIDTHS)
    for each in found:
        assert each["dark"] == (scheme == "dark")
        assert each["texts"] > 10
        assert not each["faults"], (name, each["width"], each["faults"])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: nobody has looked at the pages")
@pytest.mark.parametrize("name", NAMES)
def test_light_and_dark_show_the_same(made, tmp_path, name):
    """A curve, a line or a label that is in one of two pictures alone has the colour of its ground in the other."""
    assert vanishing(made[name], Path(os.environ.get("DRIVETRAIN_KEEP_PAGES", tmp_path)), name) == 0


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: nobody has looked at the pages")
def test_a_curve_that_the_dark_scheme_hides_is_seen(made, tmp_path):
    hidden = "<style>@media (prefers-color-scheme: dark) { figure svg { visibility: hidden } }</style></head>"
    assert vanishing(made["run"].replace("</head>", hidden, 1), tmp_path, "run") > 100


# --- a sheet says the same in the terminal, on its page, in a CSV file and as values; text from outside is text in all ---


HOSTILE = ["[red]hot[/red]", "[/]", ":smile:", "<b>&amp;", "=1+1", "-1 +IMPORTXML(A1)"]
PACKAGE = Path(drivetrain.__file__).parent


def a_sheet() -> Sheet:
    table = Table(["run", *HOSTILE], [["a", *HOSTILE], ["b", *HOSTILE[::-1]]], "The runs", sortable=True, winner=1)
    return Sheet(f"{HOSTILE[0]} – drivetrain", HOSTILE[1], [heading(HOSTILE[3]), table, words(*HOSTILE), commands(*HOSTILE)])


def test_a_narrow_screen_leaves_out_what_a_narrow_terminal_does():
    """By a class that only phones hide, with a line that names it."""
    wide = ["of the run and of its machine"] * 3
    table = Table(["run", "accuracy", "speed", "folder"], [["a", "0.9", *wide[1:]]], "The runs", spare=("folder", "speed"))
    assert re.findall(r'class="spare">(?:<button[^>]*>)?([^<]+)', table.html) == ["speed", "folder", *wide[1:]]
    assert "A wider screen shows: folder, speed." in table.html
    assert "spare" not in Table(["run", "accuracy"], [["a", "0.9"]], spare=("accuracy",)).html


@pytest.mark.parametrize("live", [True, False])
def test_a_name_is_text_in_the_terminal_on_the_page_and_in_a_file(live, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(output, "can_redraw", lambda stream: live)
    monkeypatch.setenv("COLUMNS", "300")
    found = a_sheet()
    found.show()
    said = capsys.readouterr().out
    for name in HOSTILE:
        assert said.count(name) >= 5, name  # header, both rows, words, commands
    assert said.splitlines()[-1] == "[/]."
    page = pages.check(found.write(tmp_path / "page.html").read_text())
    texts = [text for _, text in page.texts]
    for name in HOSTILE:
        assert texts.count(name) >= 3, name
    found.sections[1].write_csv(tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        header, first, _ = csv.reader(file)
    assert header == ["run", *(f"'{name}" if name[0] in "=-" else name for name in HOSTILE)]
    assert first[1:] == header[1:]
    values = found.as_dict()
    assert values["answer"] == "[/]"
    assert values["The runs"][0] == {"run": "a", **{name: name for name in HOSTILE}}


@pytest.mark.parametrize("file", ['"><script>alert(1)</script>', "javascript:alert(1)", "a b/report.html"])
def test_a_link_leads_to_a_file_whatever_its_name(file):
    page = pages.check(Sheet("a page", "an answer", [Table(["run"], [[Drawn("<b>", file=file)]])]).page())
    ((link, _),) = page.all("a")
    assert unquote(link["href"]) == file
    assert not re.search(r"[:<>\" ]", link["href"])
    assert ("a", "<b>") in page.texts


def test_bars_and_titles_of_progress_take_a_name_as_it_is(monkeypatch, capsys):
    from drivetrain.ui.terminal import _bar

    monkeypatch.setattr(output, "can_redraw", lambda stream: True)
    bar, task = _bar(3)
    bar.update(task, text=HOSTILE[0], left=HOSTILE[1])
    bar.console.print(bar.get_renderable(), width=200)
    bar.console.print(HOSTILE[0], HOSTILE[2])
    said = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert said.count(HOSTILE[0]) == 2
    assert HOSTILE[1] in said
    assert HOSTILE[2] in said


def test_nothing_in_the_package_is_markup():
    """A tag such as [bold] would be read in what came from outside as well: styles are given beside a text."""
    tags = re.compile(
        r"\[/?(?:bold|dim|italic|underline|strike|reverse|red|green|yellow|blue|cyan|magenta|white|link)\b[^\]\n]*\]"
    )
    by_hand = re.compile(r"from_markup|markup=True|emoji=True|TextColumn\((?![^\n]*markup=False)")
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert not [(name, found[0]) for name, text in files.items() for found in [tags.search(text), by_hand.search(text)] if found]


def test_a_cell_is_no_formula():
    for text in (
        "=1+1", "+cmd|' /C calc'!A0", "-2+3+cmd|x", "@SUM(1)", "\t=1", "\r=1", "\n=1", "-x 1 2", "-1 +IMPORTXML(A1)",
        "+nan +HYPERLINK(A1)", "-1 s+1", "-1  s", "+1 @x", "-1\n=2", "＝1+1",
    ):  # fmt: skip
        assert spreadsheet(text) == f"'{text}", text
    for text in ("-1.5", "-3.2 ms", "+1e-3", "–", "", "a=b", "1,000", "-inf", "-1,000.5 samples", "-[12]", None, -1.5):
        assert spreadsheet(text) == text, text


def test_a_table_without_what_says_nothing_or_the_same_of_all():
    table = Table(["a", "b", "c", "d"], [["1", "x", "2", "–"], ["1", "x", "3", ""]])
    assert [*table.used().header] == ["a", "b", "c"]
    found, same = table.differing()
    assert ([*found.header], found.texts(), same) == (["a", "c"], [["1", "2"], ["1", "3"]], [("b", "x")])
    assert [*table.differing(2)[0].header] == ["a", "b", "c"]


def test_a_table_drops_spare_columns_until_it_fits(capsys):
    table = Table(["a", "b", "c"], [["x" * 10, "y" * 20, "z" * 30]], spare=("c", "no such column", "b"))
    for room, header in ((None, "abc"), (80, "abc"), (50, "ab"), (20, "a")):
        found, left_out = table.fitting(room)
        assert "".join(found.header) == header
        assert {*"abc"} - {*left_out} == {*header}
    replace(table, width=50).show()
    said = capsys.readouterr().out
    assert "not shown here: c" in said
    assert "z" not in said
    replace(table, rows=table.rows * 3, most=2).show()
    assert "… and 1 more on the page" in capsys.readouterr().out


def test_a_cell_may_have_a_drawing_and_a_share(capsys):
    table = Table(["a", "b"], [["x", Drawn("1 – 2", "<svg></svg>")], ["y", Drawn("5", share=0.25)]])
    assert "<td><svg></svg>1 – 2</td>" in table.html
    assert '<td style="--share:0.250">5</td>' in table.html
    table.show()
    assert "1 – 2" in capsys.readouterr().out


def test_the_terminal_has_no_room_for_remarks_drawings_and_what_is_folded(capsys):
    sections = [remarks("soft"), PagePart("<svg></svg>"), folded("more", [words("hidden")])]
    Sheet("", "done", sections).show()
    assert capsys.readouterr().out == "done.\n"
    assert (
        '<p class="soft">soft</p><svg></svg><details><summary>more</summary><p>hidden</p></details>'
        in Sheet("", "", sections).page()
    )


def test_a_notebook_shows_the_answer_and_the_first_table():
    shown = a_sheet()._repr_html_()
    assert shown.startswith("<p><b>[/].</b></p><div")
    assert shown.count("<table>") == 1


def test_long_words_go_on_in_the_next_line_after_their_parts():
    name = "photos/leaf/016.jpg runtime.cudnn_benchmark=true a=1 x/"
    assert sheet.breakable(name) == "photos/<wbr>leaf/<wbr>016.jpg runtime.cudnn_benchmark=<wbr>true a=1 x/"
    assert sheet.breakable("<i>" * 9) == "&lt;i&gt;" * 9
    page = pages.check(Sheet("", "", [words("x"), Table(["variant"], [[name]])]).page())
    assert not page.all("wbr")[0][0]


def test_a_sentence():
    assert sheet.sentence("the run\nis  fast") == "the run is fast."
    assert sheet.sentence("mlp on digits") == "mlp on digits."
    assert sheet.sentence("lr=1 is fast.") == "lr=1 is fast."
    assert sheet.sentence("")


def test_a_table_is_written_for_a_paper():
    table = Table(["variant", "speed"], [["a_b|c", "1.5 × ± 3 %"]])
    assert table.written("markdown") == "| variant | speed |\n|---|---|\n| a_b\\|c | 1.5 × ± 3 % |"
    assert table.written("latex").splitlines()[4] == r"a\_b|c & 1.5 $\times$ $\pm$ 3 \% \\"
