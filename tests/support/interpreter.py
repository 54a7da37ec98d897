"""Programs in fresh interpreters: what a process chooses and imports can only be shown in a new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

# Makes frameworks look as if they were not installed: `find_spec` is asked first by every import.
_BLOCKER = """
import importlib.abc, importlib.machinery, sys
class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name.partition(".")[0])
sys.meta_path.insert(0, _Absent())
"""


def run_fresh(program: str, *, absent: tuple[str, ...] = (), **variables: str) -> Any:
    """What `program` leaves in `result` (JSON), run in a new interpreter with `absent` frameworks hidden.

    An exception comes back as {"error": class names of its MRO, "text": message}.
    """
    indented = "\n".join("    " + line for line in program.strip().splitlines())
    source = (
        (_BLOCKER.format(absent=absent) if absent else "import sys\n")
        + "import json\nresult = None\ntry:\n"
        + indented
        + "\nexcept Exception as error:\n"
        + "    result = {'error': [c.__name__ for c in type(error).__mro__], 'text': str(error)}\n"
        + "print('\\n' + json.dumps(result))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOG_v": "3"}
    environment.pop("HYPER_PARALLEL_PLATFORM", None)
    environment.update(variables)
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
