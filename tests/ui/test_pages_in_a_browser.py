"""Every page in headless Chromium, at three widths, light and dark: what a reader would see, measured in the browser.

Pictures are compared with each other, light with dark, and not with stored ones: fonts and their smoothing differ from machine to
machine, and a stored picture would either fail on each of them or be compared so loosely that it proves nothing. What is
measured beside is what a picture is looked at for: nothing is cut off or runs out of the page, text does not lie on text,
contrasts, sizes, and that sorting works by keyboard. DRIVETRAIN_KEEP_PAGES=DIR keeps the pages and the pictures.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import made_pages

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
  const buttons = [...doc.querySelectorAll('th[aria-sort] button')];
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return made_pages.every(tmp_path_factory.mktemp("pages"))


def scheme_flag(scheme: str) -> str:
    return f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"


def picture_of(page: str, scheme: str, file: Path) -> Path:
    """A picture of a page at all widths, beside each other, as a reader opens it."""
    wrapper = file.with_suffix(".html")
    wrapper.write_text(frames(page), encoding="utf-8")
    chromium(scheme_flag(scheme), "--window-size=2700,1500", f"--screenshot={file}", wrapper.as_uri())
    return file


def edges(picture: np.ndarray) -> np.ndarray:
    """How far the levels differ within each block of 4 x 4 pixels."""
    height, width = (n // 4 for n in picture.shape)
    blocks = picture[: 4 * height, : 4 * width].reshape(height, 4, width, 4).astype(int)
    return blocks.max(axis=(1, 3)) - blocks.min(axis=(1, 3))


def vanishing(page: str, folder: Path, name: str) -> int:
    """How many blocks show something in one of the two schemes that cannot be seen in the other."""
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


PAGES = ["run", "failed run", "report", "compare", "ablate", "tune", "doctor", "bisect", "certify"]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: nobody has looked at the pages")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
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
@pytest.mark.parametrize("name", PAGES)
def test_light_and_dark_show_the_same(made, tmp_path, name):
    """What is there in one of two pictures and not in the other has the colour of its ground: a curve, a line, a label."""
    folder = Path(os.environ.get("DRIVETRAIN_KEEP_PAGES", tmp_path))
    assert vanishing(made[name], folder, name) == 0


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed: nobody has looked at the pages")
def test_a_curve_that_the_dark_scheme_hides_is_seen(made, tmp_path):
    hidden = "<style>@media (prefers-color-scheme: dark) { figure svg { visibility: hidden } }</style></head>"
    assert vanishing(made["run"].replace("</head>", hidden, 1), tmp_path, "run") > 100
