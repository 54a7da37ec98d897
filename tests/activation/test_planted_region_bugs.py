"""Bugs planted in the regions: each is found by the random programs that run in every test run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

SOURCE = Path(__file__).resolve().parents[2] / "src"
GLUE = "hyper_parallel/platform/torch/activation_checkpoint"


class Bug(NamedTuple):
    name: str
    file: str
    line: str
    instead: str
    first_seed: int = 0  # the first of 150 programs: rare bugs need the right ones
    num_runs: int = (
        1  # of each program: in the third, recorded ops run without their function; with 4, forwards are not watched
    )


BUGS = [
    Bug("a random op that runs again draws other numbers", "replaying.py", "op.state.restore()", "pass"),
    Bug("a replay leaves the generators where it got to", "second_call.py", "            states,\n", ""),
    Bug("a replay writes into the user's memory", "replaying.py",
        "if storage_key(by_id.get(id(tensor), tensor)) not in self._own:", "if False:", 150),
    Bug("two views of one value are taken for the same argument", "values.py",
        "rest.append((argument.dtype, argument.size(), argument.stride(), argument.storage_offset()))", "pass", 400),
    Bug("a saved value that was written over is used", "frame.py", "value.kept = None  # written over since", "pass"),
    Bug("every input is a leaf in replay", "inputs.py", "        if each.is_leaf:\n", "        if True:\n"),
    Bug("a replay begins with what the region has written", "replaying.py",
        "self._states: dict[int, Value] = dict(record.before_write)", "self._states: dict[int, Value] = {}"),
    Bug("what a policy said of a view is forgotten by the residual", "frame.py",
        "each.keep(record.ops[each.value.op].place())", "pass"),
    Bug("a recorded op draws other numbers", "recorded_ops.py", "op.state.restore()", "pass", num_runs=3),
    Bug("recorded ops leave the generators where they got to", "recorded_ops.py", "with left_as_found(drawn), drawn, ", "with ", num_runs=3),
    Bug("a recorded op reads the whole value in place of a view", "recorded_ops.py",
        "at_hand[0] if at_hand[1] == look else _seen(at_hand[0], look)", "at_hand[0]", num_runs=3),
    Bug("recorded ops run again for other scalars", "values.py",
        "return list(map(type, rest)) == self.types and self.rest == rest", "return True", num_runs=3),
    Bug("a second run of what was not watched draws other numbers", "unwatched_region.py", "                state.restore()", "                pass", first_seed=300, num_runs=4),
    Bug("it leaves the generators where it got to", "unwatched_region.py",
        "            states,\n", "", num_runs=4),
    Bug("a residual is given what another one dropped", "unwatched_region.py", "tensor = found.pop(number)", "tensor = found.pop(min(found))",
        num_runs=4),
    Bug("a view of what was kept is taken for all of it", "unwatched_second_run.py",
        "return view.on(storage, tensor.device)", "return tensor", num_runs=4),
]  # fmt: skip

CAMPAIGN = """
import sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from support.region_programs import ModuleRunner, Runner, UnwatchedRunner, differences, draw
from support.swapping import Swapping
from hyper_parallel.platform.torch.activation_checkpoint.region import checkpoint
num_runs = int(sys.argv[3])
with Swapping("cpu", Path(sys.argv[1])).configured():
    for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 150):
        program = draw(seed)
        runner = Runner(checkpoint) if num_runs == 1 else ModuleRunner(checkpoint)
        if num_runs == 4:
            runner = UnwatchedRunner(checkpoint, is_dynamic=seed % 3 == 0)
        plain = runner.run(program, managed=False)
        try:
            wrong = [each for _ in range(num_runs) for each in differences(plain, runner.run(program, managed=True))]
        except Exception as error:
            wrong = repr(error)
        if wrong:
            print("found", seed, wrong)
            break
    else:
        print("nothing found")
"""


def campaign(source: Path, directory: Path, first_seed: int = 0, num_runs: int = 1) -> str:
    directory.mkdir()
    tests = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CAMPAIGN, str(directory), str(first_seed), str(num_runs)],
        env={"PYTHONPATH": f"{source}:{tests}", "PATH": "/usr/bin:/bin", "HYPER_PARALLEL_PLATFORM": "torch"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = done.stdout.splitlines()
    return lines[-1] if lines else f"died: {done.returncode} {done.stderr[-500:]}"


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_random_programs_find(bug: Bug, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "src" / GLUE / bug.file
    text = file.read_text()
    if text.count(bug.line) != 1:
        raise LookupError(f"{bug.name}: its line stands {text.count(bug.line)} times; bring the list up to date")
    file.write_text(text.replace(bug.line, bug.instead))
    found = campaign(tmp_path / "src", tmp_path / "files", bug.first_seed, bug.num_runs)
    assert found.startswith("found"), found


@pytest.mark.parametrize("num_runs", [1, 3, 4])
def test_they_find_nothing_where_nothing_was_planted(tmp_path: Path, num_runs: int) -> None:
    assert campaign(SOURCE, tmp_path / "files", num_runs=num_runs) == "nothing found"
