"""A sheet says the same in the terminal, on its page, in a CSV file and as values; text from outside is text in all of them."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest

import drivetrain
from drivetrain.ui import output, sheet
from drivetrain.ui.sheet import Drawn, Part, Sheet, Table, commands, folded, heading, remarks, spreadsheet, words
from tests.support import pages

NAMES = ["[red]hot[/red]", "[/]", ":smile:", "<b>&amp;", "=1+1", "-1 +IMPORTXML(A1)"]
PACKAGE = Path(drivetrain.__file__).parent


def made() -> Sheet:
    table = Table(["run", *NAMES], [["a", *NAMES], ["b", *NAMES[::-1]]], "The runs", sortable=True, winner=1)
    return Sheet(f"{NAMES[0]} – drivetrain", NAMES[1], [heading(NAMES[3]), table, words(*NAMES), commands(*NAMES)])


@pytest.mark.parametrize("live", [True, False])
def test_a_name_is_text_in_the_terminal_on_the_page_and_in_a_file(live, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(output, "can_redraw", lambda stream: live)
    monkeypatch.setenv("COLUMNS", "300")
    found = made()
    found.show()
    said = capsys.readouterr().out
    for name in NAMES:
        assert said.count(name) >= 5, name  # header, both rows, words, commands
    assert said.splitlines()[-1] == "[/]."
    page = pages.check(found.write(tmp_path / "page.html").read_text())
    texts = [text for _, text in page.texts]
    for name in NAMES:
        assert texts.count(name) >= 3, name
    found.sections[1].write_csv(tmp_path / "runs.csv")
    with (tmp_path / "runs.csv").open(newline="") as file:
        header, first, _ = csv.reader(file)
    assert header == ["run", *(f"'{name}" if name[0] in "=-" else name for name in NAMES)]
    assert first[1:] == header[1:]
    values = found.as_dict()
    assert values["answer"] == "[/]"
    assert values["The runs"][0] == {"run": "a", **{name: name for name in NAMES}}


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
    bar.update(task, text=NAMES[0], left=NAMES[1])
    bar.console.print(bar.get_renderable(), width=200)
    bar.console.print(NAMES[0], NAMES[2])
    said = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)
    assert said.count(NAMES[0]) == 2
    assert NAMES[1] in said
    assert NAMES[2] in said


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
    for text in ("-1.5", "-3.2 ms", "+1e-3", "–", "", "a=b", "1,000", "-inf", "-1,000.5 samples"):
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
    assert "… and 1 more, which the page has" in capsys.readouterr().out


def test_a_cell_may_have_a_drawing_and_a_share(capsys):
    table = Table(["a", "b"], [["x", Drawn("1 – 2", "<svg></svg>")], ["y", Drawn("5", share=0.25)]])
    assert "<td><svg></svg>1 – 2</td>" in table.html
    assert '<td style="--share:0.250">5</td>' in table.html
    table.show()
    assert "1 – 2" in capsys.readouterr().out


def test_the_terminal_has_no_room_for_remarks_drawings_and_what_is_folded(capsys):
    sections = [remarks("soft"), Part("<svg></svg>"), folded("more", [words("hidden")])]
    Sheet("", "done", sections).show()
    assert capsys.readouterr().out == "done.\n"
    assert (
        '<p class="soft">soft</p><svg></svg><details><summary>more</summary><p>hidden</p></details>'
        in Sheet("", "", sections).page()
    )


def test_a_notebook_shows_the_answer_and_the_first_table():
    shown = made()._repr_html_()
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
