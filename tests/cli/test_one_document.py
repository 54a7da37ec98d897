"""Standard output is for the document alone, whatever the user's code and libraries print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy", reason="the solver is in SciPy")

# Where a program can print: when it is imported, in the function, in a forward; from Python, from a child, from C (which has a buffer of its own).
CHATTY = """
import ctypes, subprocess, sys
import torch

print("imported")
libc = ctypes.CDLL(None)

class Chatty(torch.nn.Sequential):
    def forward(self, x):
        print("forward")
        libc.printf(b"from C, as HiGHS does\\n")
        return super().forward(x)

def build():
    print("built")
    libc.printf(b"from C\\n")
    subprocess.run(["echo", "from a child"], check=True)
    blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2))
    return Chatty(torch.nn.Sequential(*blocks)), torch.ones(4, 8), lambda y: y.sum()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="C's library has no name there")
@pytest.mark.parametrize("command", ["plan --budget 100% --report page.html", "explain"])
def test_what_a_users_code_prints_goes_to_standard_error(command: str, tmp_path: Path) -> None:
    (tmp_path / "chatty.py").write_text(CHATTY)
    name, *options = command.split()
    ended = subprocess.run(
        [sys.executable, "-m", "hyper_parallel", name, "chatty:build", *options, "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)
    for words in ("imported", "built", "forward", "from a child", "from C\n"):
        assert words in ended.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no sh")
def test_a_command_works_where_standard_output_is_closed(tmp_path: Path) -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "hyper_parallel", "plan", "not_here:build"]
    ended = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (
        2,
        "The module that builds the model cannot be imported.",
    )
