"""A notebook as one HTML file that needs nothing beside it: no network, no folder of pictures.

This is for a chapter rerun by its reader, not for the book. It reads the Markdown that chapters use
(headings, tables, admonitions, math) and writes figures into the page itself. Math is drawn by the same
offline script as the book's, put into the page only where there is math.
"""

from __future__ import annotations

import html
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1c1e21; max-width: 52rem; margin: 2rem auto; padding:
0 1rem } pre { background: #f4f5f7; padding: .7rem .9rem; overflow-x: auto; font-size: .85rem; border-left:
3px solid #3a7d44 } pre.output { background: none; border-left-color: #d5d8dc } code { background: #f4f5f7;
padding: 0 .2rem } pre code { padding: 0 } table { border-collapse: collapse; font-size: .92rem; margin:
1rem 0 } th, td { padding: .25rem .7rem; text-align: left; border-bottom: 1px solid #d5d8dc } img {
max-width: 100% } aside, details { border-left: 4px solid #b9770e; background: #fdf6e7; padding: .4rem
.9rem; margin: 1rem 0 } details { border-left-color: #2874a6; background: #eef5fb; overflow-x: auto }
summary { font-weight: 600 }
"""


def to_html(notebook: Any, title: str) -> str:
    """Render a page's notebook.

    Parameters
    ----------
    notebook : NotebookNode
        As `moecache.chapters.assemble` leaves it.
    title : str

    Returns
    -------
    str
        A complete HTML document.
    """
    body = "\n".join(_cell(cell) for cell in notebook.cells)
    script = f"<script>{_mathjax()}</script>" if 'class="math' in body else ""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}{_code_style()}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n{body}\n{script}</body></html>\n"


def _cell(cell: Any) -> str:
    if cell.cell_type == "markdown":
        return _markdown().render(cell.source)
    code = [_code(cell.source)] if cell.source else []
    return "\n".join([*code, *(_output(output, cell) for output in cell.outputs)])


def _output(output: Any, cell: Any) -> str:
    if output.output_type == "stream":
        return f'<pre class="output">{html.escape(output.text)}</pre>'
    data = output.get("data", {})
    if "image/png" in data:
        alt = html.escape(cell.metadata["mystnb"]["image"]["alt"], quote=True)
        return f'<p><img alt="{alt}" src="data:image/png;base64,{data["image/png"].strip()}"></p>'
    if "text/html" in data:
        return data["text/html"]
    return f'<pre class="output">{html.escape(data["text/plain"])}</pre>' if "text/plain" in data else ""


def _code(source: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return highlight(source, PythonLexer(), HtmlFormatter())


@cache
def _code_style() -> str:
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter().get_style_defs(".highlight")


@cache
def _markdown() -> Any:
    from markdown_it import MarkdownIt
    from mdit_py_plugins.dollarmath import dollarmath_plugin

    reader = MarkdownIt("commonmark").enable("table").use(dollarmath_plugin, renderer=_math)
    reader.add_render_rule("fence", _fence)
    reader.add_render_rule("link_open", _link_open)
    return reader


def _math(content: str, options: dict[str, bool]) -> str:
    written = html.escape(content)
    return f"\\[{written}\\]" if options["display_mode"] else f"\\({written}\\)"


def _fence(self: Any, tokens: Any, place: int, options: Any, env: Any) -> str:
    """Render a fenced block: an admonition as a box, anything else as code."""
    token = tokens[place]
    directive = re.fullmatch(r"\{(\w+)\}\s*(.*)", token.info.strip())
    if directive is None:
        return f"<pre><code>{html.escape(token.content)}</code></pre>\n"
    lines = token.content.splitlines()
    options_text = [line for line in lines if re.match(r":\w+:", line)]
    inside = _markdown().render("\n".join(line for line in lines if line not in options_text))
    heading = html.escape(directive[2] or directive[1].capitalize())
    if any("dropdown" in line for line in options_text):
        return f"<details><summary>{heading}</summary>{inside}</details>\n"
    return f"<aside><strong>{heading}</strong>{inside}</aside>\n"


def _link_open(self: Any, tokens: Any, place: int, options: Any, env: Any) -> str:
    address = tokens[place].attrs["href"]
    # A link to another page of the book leads nowhere from a page that stands by itself.
    return f'<a href="{html.escape(address)}">' if re.match(r"https?:|#", address) else "<a>"


def _mathjax() -> str:
    found = find_spec("sphinx-mathjax-offline")
    if found is None or found.origin is None:
        raise RuntimeError("sphinx-mathjax-offline is not installed: run `make setup`")
    return (Path(found.origin).parent / "static" / "mathjax" / "tex-svg.js").read_text()
