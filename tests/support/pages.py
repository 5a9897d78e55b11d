"""The things that every page must have, read from its HTML; and one page of each kind, made without a run."""

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "input", "link", "hr", "wbr"}


class Page(HTMLParser):
    """The elements of a page in their order, and the text of each."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []  # tag, attributes, the tags around it
        self.texts: list[tuple[str, str]] = []  # tag, text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), list(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), list(self.open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open and self.open[-1] not in ("style", "script", "title"):
            self.texts.append((self.open[-1], data.strip()))

    def all(self, tag: str) -> list[tuple[dict[str, str | None], list[str]]]:
        return [(attributes, around) for name, attributes, around in self.elements if name == tag]


def check(text: str) -> Page:
    """The rules of docs/design-pages.md, as far as the HTML tells of them. Returns what was read."""
    page = Page(text)
    assert not page.open, page.open
    tag, first = page.texts[0]
    assert tag == "h1", first  # the answer comes first, in one sentence
    assert first.endswith((".", "!", "?")), first
    assert "\n" not in first
    assert len(page.all("h1")) == 1
    for name in ("link", "iframe", "object", "base"):
        assert not page.all(name)
    for attributes, _ in page.all("script") + page.all("img"):
        assert (attributes.get("src") or "data:").startswith("data:")
    assert len(page.all("script")) == 1, "text from outside has become a script"
    for attributes, _ in page.all("img"):
        assert attributes["alt"]
    for attributes, _ in page.all("svg"):
        assert attributes.get("aria-hidden") == "true" or (attributes["role"] == "img" and attributes["aria-label"]), attributes
        assert "nan" not in str(attributes) + str(attributes.get("data-x"))
    for attributes, around in page.all("th"):
        assert attributes["scope"] in ("col", "row")
        assert "aria-sort" not in attributes or around[-2:] == ["thead", "tr"]
    sorting = [attributes for attributes, _ in page.all("th") if "aria-sort" in attributes]
    assert len(sorting) == len([around for _, around in page.all("button") if around[-1] == "th"])
    assert all(around[-1] == "div" for _, around in page.all("table"))
    assert len(page.all("table")) == len([a for a, _ in page.all("div") if a.get("role") == "region" and a.get("aria-label")])
    for attributes, _ in page.all("input"):
        assert attributes["id"] in [label["for"] for label, _ in page.all("label")]
    assert all(event not in attributes for _, attributes, _ in page.elements for event in ("onclick", "onerror", "onload"))
    return page
