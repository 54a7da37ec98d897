"""The frame of the pages that we write: one file, which loads nothing from anywhere."""

from __future__ import annotations

from html import escape


def framed(title: str, style: str, body: str) -> str:
    """Make a whole page. `title` is plain text; `style` and `body` stand as they are.

    Example:
        >>> framed("Plan", "p {}", "<p>1 GiB</p>").splitlines()[0]
        '<!doctype html>'
    """
    return _FRAME.format(title=escape(title), style=style, body=body)


_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""
