"""Runs the steps of a page, one after the other, in this process: `python -m support.document_process STEPS.json`."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(path: str) -> None:
    document = json.loads(Path(path).read_text())
    page, names = document["page"], {"__name__": "__main__"}
    said = ""
    for kind, text, line, about in document["steps"]:
        where = f"{page}:{line}"
        print(f"-- {where}", file=sys.stderr, flush=True)
        if kind == "python":
            said = run(text, page, line, about, names)
        elif kind == "file":
            Path(about).write_text(text + "\n")
        elif kind == "commands":
            said = run_commands(text, where)
        else:
            check(text, said, where)


def run(text: str, page: str, line: int, error: str, names: dict[str, Any]) -> str:
    """What the block printed; or the message of the error that it is said to raise."""
    code = compile("\n" * (line - 1) + text, page, "exec")  # so that a traceback names the page's own lines
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(code, names)  # noqa: S102 - the page is ours
    except Exception as raised:
        if error and error in [each.__name__ for each in type(raised).__mro__]:
            return str(raised)
        raise
    if error:
        raise AssertionError(f"{page}:{line}: no {error} was raised")
    return out.getvalue()


def run_commands(text: str, where: str) -> str:
    """Every line is one `hyper-parallel ...`; the output of the last."""
    said = ""
    for command in text.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(command, comments=True) or [""]
        if not program:
            continue
        if program != "hyper-parallel":
            raise AssertionError(f"{where}: {command!r} cannot be run here: mark the block with <!-- not run: why -->")
        done = subprocess.run(
            [sys.executable, "-m", "hyper_parallel", *words], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            raise AssertionError(f"{where}: {command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        said = done.stdout
    return said


def check(expected: str, said: str, where: str) -> None:
    """The lines stand in what was said, one after the other; blanks count as one, and "…" is anything."""
    lines = [" ".join(line.split()) for line in expected.splitlines() if line.strip()]
    pattern = r"\s".join(re.escape(line).replace("…", ".*?") for line in lines)
    flat = "\n".join(" ".join(line.split()) for line in said.splitlines() if line.strip())
    if not re.search(pattern, flat):
        raise AssertionError(f"{where}: the page shows\n{expected}\nand the program says\n{said}")


if __name__ == "__main__":
    main(sys.argv[1])
