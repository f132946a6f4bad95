"""Check every local link, picture and anchor of the built documentation.

    python tools/check_site.py site

The site generator checks links in the pages' own text only, not in what they include.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the anchors of one HTML file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are relative to wherever the reader went astray
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target /= "index.html"
            known = target in pages and parts.fragment
            if not target.is_file():
                broken.append(f"{page.path}: {link} leads nowhere")
            elif known and unquote(parts.fragment) not in pages[target].anchors | {"__skip"}:
                broken.append(f"{page.path}: {link} names no anchor there")
    return broken


def main() -> None:
    site = Path(sys.argv[1])
    if not (site / "index.html").is_file():
        sys.exit(f"{site} holds no index.html; build it with: nox -s docs")
    if broken := broken_links(site):
        sys.exit("\n".join(broken))
    print(f"every local link of {len(list(site.rglob('*.html')))} pages leads somewhere")


if __name__ == "__main__":
    main()
