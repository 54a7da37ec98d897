"""Makes "Example:" of our docstrings what Griffe calls "Examples:", so that they are shown as code."""

from __future__ import annotations

import textwrap
from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        docstring = obj.docstring
        if docstring is None or "\nExample:\n" not in docstring.value:
            return
        before, _, after = docstring.value.partition("\nExample:\n")
        if ">>>" not in after:  # code without a prompt: as a code block inside of the section
            after = textwrap.indent(after, "    ")
        docstring.value = f"{before}\nExamples:\n{after}"
