"""A page of Markdown as one file of HTML, for those who have no builder of sites."""

from __future__ import annotations

import re
from pathlib import Path

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #ccc; padding: .3rem .6rem; text-align: left; vertical-align: top; }
svg { max-width: 100%; height: auto; }
"""


def standalone(source: Path, folder: str) -> str:
    """A page of Markdown as HTML that needs no other file: its pictures are in it.

    Args:
        source: the page.
        folder: where it is, as seen from where the HTML will be; what it links to is found by that.
    """
    import markdown  # mkdocs brings it

    body = markdown.markdown(source.read_text(), extensions=["tables"])
    body = re.sub(r'<img [^>]*src="([^"]+\.svg)"[^>]*>', lambda found: _picture(source.parent / found[1]), body)
    body = re.sub(r'href="(?!\w+:|#)', f'href="{folder}/', body)
    return f"<!doctype html>\n<meta charset='utf-8'>\n<title>Measured</title>\n<style>{STYLE}</style>\n{body}\n"


def _picture(path: Path) -> str:
    text = path.read_text()
    return text[text.index("<svg") :]
