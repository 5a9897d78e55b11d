"""mkdocs' hook: adds the pages that are made from the code and from measurements, and the files that pages link to."""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "src")]

import cards  # noqa: E402
import matrix  # noqa: E402
import reference  # noqa: E402

HOME = {"index.md": "README.md", "changes.md": "CHANGELOG.md"}  # page → the file that it is
LINK = re.compile(r"(!?)\[([^\]\[]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
COPIED = "repository"  # the folder of the files outside docs that pages link to


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the techniques into the navigation."""
    for entry in config.nav or []:
        if "Techniques" in entry:
            entry["Techniques"] = [{title: f"techniques/{name}.md"} for name, title in cards.titles().items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {page: (ROOT / file).read_text(encoding="utf-8") for page, file in HOME.items()}
    pages |= {f"techniques/{name}.md": text for name, text in cards.pages(ROOT).items()}
    pages |= {f"reference/{name}.md": text for name, text in reference.pages().items()}
    pages["pairwise.md"] = matrix.page(cards.overrides())
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted({path for file in files.documentation_pages() for path in _outside(file)}):
        files.append(File.generated(config, f"{COPIED}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to where the site has what they name. A folder outside docs is named only."""
    if page.file.src_uri == "words.md":
        markdown += reference.words()

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        path = _in_repository(page.file.src_uri, target)
        if path is None:
            return found[0]
        if path.startswith("docs/"):
            place = path.removeprefix("docs/")
        elif path in HOME.values():
            place = next(page for page, file in HOME.items() if file == path)
        elif (ROOT / path).is_file():
            place = f"{COPIED}/{path}"
        else:
            return f"{text} (`{path}`)"
        return f"{image}[{text}]({posixpath.relpath(place, posixpath.dirname(page.file.src_uri) or '.')}{anchor or ''})"

    return LINK.sub(link, markdown)


def _in_repository(page: str, target: str) -> str | None:
    """The path below the repository that a page's link means; None for an address."""
    if "://" in target or target.startswith("mailto:"):
        return None
    folder = "" if page in HOME else posixpath.join("docs", posixpath.dirname(page))
    return posixpath.normpath(posixpath.join(folder, target))


def _outside(file: File) -> set[str]:
    """The files outside docs that a page links to."""
    found: set[str] = set()
    for _, _, target, _ in LINK.findall(file.content_string):
        path = _in_repository(file.src_uri, target)
        if path and not path.startswith(("docs/", "..")) and path not in HOME.values() and (ROOT / path).is_file():
            found.add(path)
    return found
