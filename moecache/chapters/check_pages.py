"""What must hold for built pages: they load nothing from a network, their links lead somewhere, images have words.

The book's builder checks references in the sources. This reads what a reader's browser will read: every
address that a page loads from must be a file beside it, every link inside the book must reach a page and,
where it names one, a heading on it, and every image must have alternative text that is not just its file
name. Links that a reader may follow to other sites are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
          "embed": "src", "object": "data", "link": "href"}  # fmt: skip
_STYLE_ADDRESS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s;]+)""")
_CODE_ADDRESS = re.compile(r"""(?:\bfrom|\bimport\s*\(|\.src\s*=|fetch\s*\()\s*["'](https?://[^"']+)""")


class _Page(HTMLParser):
    """The addresses, headings and images of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.names: set[str] = set()
        self.images: list[tuple[str, str | None]] = []
        self.code: list[str] = []
        self._inside = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._inside = tag
        self.names |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in _LOADS and given.get(_LOADS[tag]):
            self.loads.append(given[_LOADS[tag]])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.images.append((given.get("src", ""), given.get("alt")))
        self.code.append(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style"):
            self.code.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def faults(site: Path) -> list[str]:
    """Return what is wrong with the pages of a site, a line each.

    Parameters
    ----------
    site : Path
        Folder with built HTML.
    """
    paths = [path for path in sorted(site.resolve().rglob("*.html")) if "_static" not in path.parts]
    pages = {path: _Page(path) for path in paths}
    found = [f"{path.relative_to(site.resolve())} {told}" for path in paths for told in _faults(path, pages)]
    for style in sorted(site.rglob("*.css")):
        addresses = _STYLE_ADDRESS.findall(style.read_text())
        found += [f"{style.relative_to(site)} loads {address} from the network" for address in addresses]
    return found


def _faults(path: Path, pages: Mapping[Path, _Page]) -> Iterator[str]:
    page = pages[path]
    code = "\n".join(page.code)
    for address in [*page.loads, *_STYLE_ADDRESS.findall(code), *_CODE_ADDRESS.findall(code)]:
        if urlsplit(address).netloc:
            yield f"loads {address} from the network"
    for address in [*page.loads, *page.links]:
        if not _is_reached(path, address, pages):
            yield f"links to {address}, which is not there"
    for source, alt in page.images:
        if not alt or not alt.strip() or alt == source or alt.endswith(Path(source).name):
            yield f"has an image without alternative text: {source}"


def _is_reached(path: Path, address: str, pages: Mapping[Path, _Page]) -> bool:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target in pages and parts.fragment:
        return unquote(parts.fragment) in pages[target].names
    return target.exists()
