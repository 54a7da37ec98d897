"""Which files of the package four calls go through: the four walks of `docs/architecture.md`, counted.

    python tests/support/walks.py                      the table: files, and changes of folder
    python tests/support/walks.py --files matmul       every file of one walk in the order of entry, with its functions
    PYTHONPATH=OTHER/src python tests/support/walks.py the same of another checkout: nothing but public names is used

A walk is a small program that runs under `sys.setprofile`. What is counted of it:

    files     files of the package in which a function was called, each once
    changes   changes of folder: pairs of files in two folders of which the first called into the second, each once.
              A loop goes the same way many times and counts once, as it does for a person who follows it with a finger.
              A call that comes back through the framework or the standard library counts as one of the file of ours
              that is next above it on the stack.

What runs while a module is imported is left out: it is there or not by what was imported before. The table has the
counts with imports, too. Threads are left out: what they do is launched, and waited for, by the thread that is watched.
Each walk runs in a process of its own, forked when PyTorch and the package are imported and before anything has run.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel import policies as p

HOME = str(Path(hp.__file__).parent) + os.sep


class Counted(NamedTuple):
    """What one walk went through."""

    functions: dict[str, list[str]]  # file -> the functions called there; both in the order of entry
    num_changes: int
    num_files_with_imports: int
    num_changes_with_imports: int


class _Call(NamedTuple):
    file: str  # the file of ours that was entered last, "" before the first one
    is_import: bool


class Watch:
    """Notes calls of the thread that enters it, until it is left."""

    def __init__(self) -> None:
        self._stack = [_Call("", is_import=False)]
        self._calls: dict[tuple[str, str, str, bool], None] = {}  # (from, into, function, while importing), in order

    def __enter__(self) -> Watch:
        gc.collect()
        gc.disable()  # what a collection runs would be called from wherever it happens to begin
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        above = self._stack[-1]
        if event == "call":
            code = frame.f_code
            is_module = code.co_name == "<module>"
            is_import = above.is_import or is_module
            is_ours = code.co_filename.startswith(HOME)
            into = code.co_filename.removeprefix(HOME) if is_ours else above.file
            if is_ours and (is_module or not code.co_name.startswith("<")):
                self._calls[above.file, into, code.co_name, is_import] = None
            self._stack.append(_Call(into, is_import))
        elif event == "return" and len(self._stack) > 1:  # what was under way when the watch began returns, too
            self._stack.pop()

    def counted(self) -> Counted:
        with_imports = list(self._calls)
        calls = [call for call in with_imports if not call[3]]
        functions: dict[str, dict[str, None]] = {}
        for _, into, name, _ in calls:
            functions.setdefault(into, {})[name] = None
        return Counted(
            {file: list(names) for file, names in functions.items()},
            _num_changes(calls),
            len({into for _, into, _, _ in with_imports}),
            _num_changes(with_imports),
        )


def _num_changes(calls: list[tuple[str, str, str, bool]]) -> int:
    return sum(os.path.dirname(here) != os.path.dirname(into) for here, into in {call[:2] for call in calls} if here)


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Tanh())


def activation() -> Watch:
    """One block whose matrix products are saved, whose GELU goes to a file, and whose tanh is computed again."""
    model = _block()
    plain = copy.deepcopy(model)
    batch = torch.randn(8, 64)
    policy = p.choose(p.swap(p.ops("aten.gelu.default")), p.save(p.matmuls))
    with tempfile.TemporaryDirectory() as folder, hp.configure_swap(disk_dir=folder, min_bytes=1), Watch() as watch:
        model = hp.checkpoint_wrapper(model, policy_fn=policy)
        model(batch).square().mean().backward()
    plain(batch).square().mean().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)
    return watch


def plan() -> Watch:
    """A plan for four blocks within 60 % of what they take, and a step under it."""
    model = nn.Sequential(*(_block() for _ in range(4)))
    batch = torch.randn(64, 64)
    with Watch() as watch:
        found = hp.plan_memory(model, batch, loss_fn=lambda out: out.square().mean(), budget="60%")
        found.apply(model)
        model(batch).square().mean().backward()
    assert [name for name, _ in hp.wrappers(model)] != []
    return watch


def matmul() -> Watch:
    """A product of two matrices that are both split by rows, so that one of them has to be moved first."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    left, right = torch.randn(4, 6), torch.randn(6, 8)
    x, y = (hp.distribute_tensor(each, mesh, [hp.Shard(0)]) for each in (left, right))
    with Watch() as watch:
        product = x @ y
    torch.testing.assert_close(product.full_tensor(), left @ right)  # summed in another order
    return watch


def all_reduce() -> Watch:
    """A sum over two ranks."""
    platform = hp.get_torch_platform()
    ones = torch.ones(4)
    with Watch() as watch:
        platform.all_reduce(ones, None)
    assert ones.tolist() == [2.0] * 4
    return watch


WALKS: dict[str, tuple[Callable[[], Watch], int]] = {  # and how many ranks it takes
    "activation": (activation, 1),
    "plan": (plan, 1),
    "matmul": (matmul, 2),
    "all_reduce": (all_reduce, 2),
}


def count(name: str) -> Counted:
    """Run a walk in processes of its own.

    Raises:
        RuntimeError: it did not do what it should, see the output.
    """
    num_ranks = WALKS[name][1]
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(name, rank, num_ranks, Path(folder)) for rank in range(num_ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"The walk {name} ended with {codes}.")
        return Counted(*json.loads(Path(folder, "counted").read_text()))


def _fork(name: str, rank: int, num_ranks: int, folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _walk(name, rank, num_ranks, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def _walk(name: str, rank: int, num_ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hp.get_torch_platform()  # also where MindSpore is installed
    if num_ranks > 1:
        store = dist.FileStore(str(folder / "store"), num_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    counted = WALKS[name][0]().counted()
    if rank == 0:
        (folder / "counted").write_text(json.dumps(counted))
    if num_ranks > 1:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description="Count the files that four calls go through.")
    parser.add_argument("--files", choices=WALKS, help="list the files of this walk, and the functions called there")
    parser.add_argument("--json", action="store_true", help="all walks, for a program to read")
    options = parser.parse_args()
    if options.files:
        for file, functions in count(options.files).functions.items():
            print(f"{file:60} {', '.join(functions)}")
        return
    found = {name: count(name) for name in WALKS}
    if options.json:
        print(json.dumps({name: counted._asdict() for name, counted in found.items()}))
        return
    print(f"{'':12}{'files':>8}{'changes of folder':>20}{'with imports: files':>24}{'changes':>10}")
    for name, counted in found.items():
        imported = f"{counted.num_files_with_imports:24}{counted.num_changes_with_imports:10}"
        print(f"{name:12}{len(counted.functions):8}{counted.num_changes:20}{imported}")


if __name__ == "__main__":
    main()
