"""The documentation as a site: a card for every option, and a build without a warning."""

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys

import pytest
from bench import pairwise

from drivetrain.config import catalog
from tests.support.command import ROOT
from tests.support.pairwise import factors


@pytest.fixture
def record(tmp_path, monkeypatch):
    """The record of pairs, as the campaign writes it, of three groups and a few refusals."""
    groups = {group: overrides for group, overrides in factors().items() if group in ("compile", "checkpointing", "precision")}
    exclude = "{} and {} exclude each other: set one to none".format
    refused = [
        ("compile=jit", "precision=bf16"),
        ("compile=jit", "checkpointing=blocks"),
        ("precision=bf16_pure", "compile=step"),
    ]
    asked = pairwise.Asked({"precision=amp": "it needs | a GPU"}, {frozenset(pair): exclude(*pair) for pair in refused}, set())
    campaign = pairwise.Campaign(pairwise.Cover(set(), groups, lambda _: None), pairwise.Journal(None), lambda *_: None)
    file = tmp_path / "pairwise.md"
    file.write_text(pairwise.document(asked, groups, campaign), encoding="utf-8")
    monkeypatch.setenv("PAIRS", str(file))


@pytest.fixture
def cards(record, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    import cards

    yield cards
    for name in ("cards", "matrix"):
        del sys.modules[name]


def test_every_option_has_a_card_with_what_it_does_its_effect_and_its_keys(cards):
    pages = cards.pages(ROOT)
    for group, names in catalog.options().items():
        for name in names:
            _, _, card = pages[group].partition(f"{{#{group}-{name}}}")
            card = card.partition("\n## ")[0]
            assert "**Effect on training:**" in card, f"{group}={name}"
            for key in catalog.option_keys(group, name) - {"preset", "_target_"}:
                assert f"| `{group}.{key}` |" in card, (group, name, key)
    assert "**When:** activations do not fit, and a third more time is acceptable." in pages["checkpointing"]
    assert "| `precision.init_scale` | `65536.0` | number > 0 ≤ 1e+38 |" in pages["precision"]
    assert "**Source:** Kingma & Ba 2015; torch.optim.Adam." in pages["optimizer"]
    assert "on AMD EPYC" in pages["surgery"]
    assert "| override | what it brings | measured here |" in pages["clip"]
    assert re.search(r"\| \[`clip=spike`\].*×.*AMD EPYC.*result on .* seeds: ", pages["clip"])
    assert re.search(r"\| \[`clip=none`\].*\| what the others are compared with \|", pages["clip"])
    assert re.search(r"\| \[`optimizer=muon`\].*<br>`optimizer.normalize=neurons`: .*result on ", pages["optimizer"])
    assert "`compile=step`: precision=bf16_pure and compile=step exclude each other" in pages["precision"]


def test_the_reference_has_each_command_key_and_function(cards):
    import reference

    pages = reference.pages()
    assert all(f"## {verb}\n" in pages["commands"] for verb in ("train", "compare", "doctor", "recipe"))
    assert "| `epochs` | `15` |" in pages["keys"]
    assert "drivetrain.train(config:" in pages["python"]


def test_a_card_says_what_an_option_goes_with(cards):
    record = sys.modules["matrix"].read()
    card = "\n".join(cards._pairs(record, "compile=jit"))
    refused = re.search(r"Refused with (\d+) other options", card)
    together = re.search(r"\*\*Combines with:\*\* (\d+) options of other groups", card)
    others = sum(len(words) for group, words in record.tried.items() if group != "compile")
    alone = sum(not word.startswith("compile=") for word in record.alone)
    assert int(refused[1]) + int(together[1]) + alone == others
    assert "`checkpointing=blocks`" in card
    assert (refused[1], alone) == ("2", 1)


def test_the_page_of_pairs_agrees_with_its_record(cards):
    """Each pair of options that was tried is a number, a mark or a reason; what came later is named."""
    import matrix

    record, page = matrix.read(), matrix.page(cards.overrides())
    sizes = [len(words) for words in record.tried.values()]
    pairs = sum(a * b for a, b in itertools.combinations(sizes, 2))
    assert record.head.startswith(f"{pairs} pairs of options: ")
    assert f"{len(record.refused)} refused" in record.head
    assert sum(int(number) for number in re.findall(r"\[(\d+)\]\(#", page)) == len(record.refused)
    assert page.count(" and `") == len(record.refused)
    assert sum(line.count("✗ |") for line in page.splitlines()) == len(record.refused)
    tried = {word for words in record.tried.values() for word in words}
    assert all(
        f"`{word}`" in page for words in cards.overrides().values() for word in words if len(words) > 1 and word not in tried
    )


@pytest.mark.slow
def test_it_builds_without_a_warning(record, tmp_path):
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: pip install 'drivetrain[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "precision.init_scale" in (tmp_path / "site" / "techniques" / "precision.html").read_text(encoding="utf-8")
    for page in (tmp_path / "site").rglob("*.html"):
        scripts = re.findall(r'<(?:script|link)[^>]+(?:src|href)="([^"]+)"', page.read_text(encoding="utf-8"))
        fetched = [script for script in scripts if "://" in script and "canonical" not in script]
        assert not fetched, (page, fetched)
        assert any(script.endswith("images/iframe-worker.js") for script in scripts), f"{page} cannot be searched from the disk"
    assert (tmp_path / "site" / "images" / "iframe-worker.js").is_file()
    shutil.rmtree(tmp_path / "site")


def test_what_the_search_needs_is_in_the_repository():
    """The site is searched from the disk, without a network: the plugin takes its shim from another host where none is named."""
    named = re.search(r"polyfills: \[(.*)\]", (ROOT / "mkdocs.yml").read_text())
    assert named is not None
    assert "iframe-worker" in named[1]
    assert "Permission is hereby granted" in (ROOT / "docs" / named[1]).read_text()
