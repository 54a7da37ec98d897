"""MindSpore's graph mode: what decides while Python runs refuses to be compiled, in words. And what MindSpore logs meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mindspore", reason="MindSpore is not installed")

# A file: MindSpore compiles what it can read. One process for all of it: to start it takes longer than the rest.
PROGRAM = """
import json
import mindspore
from mindspore import nn
import hyper_parallel as hp

class Model(nn.Cell):
    def __init__(self, wrap):
        super().__init__()
        self.block, self.head = wrap(nn.Dense(4, 4)), nn.Dense(4, 4)

    def construct(self, x):
        return self.head(self.block(x)).sum()

x, found = mindspore.ops.ones((2, 4)), {}

def note(name, function):
    try:
        found[name] = ["nothing", str(function())]
    except Exception as error:
        found[name] = [type(error).__name__, str(error)]

swapped = hp.swap_wrapper(nn.Dense(64, 64))
with hp.configure_swap(disk_dir=".", min_bytes=0):
    mindspore.grad(lambda y: swapped(y * 2).sum())(mindspore.ops.ones((64, 64)))
model = Model(hp.checkpoint_wrapper)

@mindspore.jit
def compiled(y):
    return model(y)

note("jit", lambda: compiled(x))
mindspore.set_context(mode=mindspore.GRAPH_MODE)
for wrap in (hp.checkpoint_wrapper, hp.swap_wrapper, hp.offload_wrapper):
    note(f"{wrap.__name__} inside", lambda: Model(wrap)(x))
    note(f"{wrap.__name__} alone", lambda: wrap(nn.Dense(4, 4))(x))
note("gradient", lambda: mindspore.value_and_grad(model, None, model.trainable_params())(x))
plain = nn.SequentialCell(*(nn.SequentialCell(nn.Dense(4, 4)) for _ in range(2)))
note("plan_memory", lambda: hp.plan_memory(plain, x, loss_fn=lambda y: y.sum(), budget="60%"))
note("explain", lambda: hp.explain(plain, x, loss_fn=lambda y: y.sum()))
mindspore.set_context(mode=mindspore.PYNATIVE_MODE)
note("afterwards", lambda: mindspore.grad(model)(x).shape)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder: Path = tmp_path_factory.mktemp("graph_mode")
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOG_v": "2"}
    environment.pop("HYPER_PARALLEL_PLATFORM", None)
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done


def test_what_decides_while_python_runs_refuses_to_be_compiled(done: subprocess.CompletedProcess[str]) -> None:
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("afterwards") == ["nothing", "(2, 4)"], "in PyNative mode the same model works again"
    assert len(found) == 10
    for name, (kind, text) in found.items():
        assert kind == "StateError", (name, kind, text)
        assert "PyNative mode" in text, name
        assert "set_context" in text, name


def test_swapping_uses_no_interface_that_mindspore_calls_deprecated(done: subprocess.CompletedProcess[str]) -> None:
    assert "deprecated" not in done.stderr + done.stdout
