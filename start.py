#!/usr/bin/env python3
"""Start hyper-parallel from a fresh checkout; the only thing needed is Python 3.10 to 3.13.

    python3 start.py                    plan and train a small transformer under a memory budget: `hyper-parallel demo`
    python3 start.py WORDS...           run `hyper-parallel WORDS...`
    python3 start.py test               run all checks: ruff, mypy, the documentation, pytest (-x: end with the first that fails)
    python3 start.py test ARGUMENTS...  run pytest with these arguments
    python3 start.py --here ...         any of these with this Python and the packages it has; installs nothing

Without --here a virtual environment is made in .venv beside this file and kept up to date. If this Python has PyTorch 2.8
or later, that is used, else one is installed; HYPER_PARALLEL_TORCH_INDEX can name the package index for it.
"""

# Older Pythons must be able to read this file, to be told that they are too old: nothing newer than 3.7 in here.
from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator  # noqa: UP035 - `collections.abc.Iterator[None]` is newer than 3.7

try:
    import fcntl
except ImportError:  # not a POSIX system: two starts at the same time are then not kept apart
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
MARKER = VENV / "made-by-start"  # holds the path of the checkout that it was made for, and is the lock
UNFINISHED = VENV / "unfinished"  # there while something is being installed
STAMPS = {"main": VENV / "main.stamp", "test": VENV / "test.stamp"}
CONSTRAINTS, PIP_LOG = VENV / "constraints.txt", VENV / "pip.log"
TORCH_FOLDERS = VENV / "torch-folders"  # of the PyTorch that was found outside, or nothing, and of the one in use

OLDEST_PYTHON, NEWEST_PYTHON, NEWEST_MINDSPORE_PYTHON = (3, 10), (3, 13), (3, 12)
TORCH, OLDEST_TORCH, TORCH_INDEX_VARIABLE = "2.13.0", (2, 8), "HYPER_PARALLEL_TORCH_INDEX"
MINDSPORE = ["mindspore==2.10.0", "numpy==1.26.*"]
EXTRAS = {"main": "torch,cli,files,planner", "test": "torch,cli,files,planner,dev,docs"}
CHECKS = ["ruff check .", "ruff format --check .", "mypy", "mkdocs build --strict --quiet", "pytest"]
ONEDNN_VARIABLE, ONEDNN_CURE = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"


def main(words: list[str]) -> int:
    if words[:1] in (["-h"], ["--help"]):
        print(__doc__.strip())
        return 0
    check_python(sys.version_info[:2])
    is_here = words[:1] == ["--here"]
    words = words[1:] if is_here else words
    level = "test" if words[:1] == ["test"] else "main"
    python, environment = sys.executable, dict(os.environ)
    if is_here:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), environment.get("PYTHONPATH")]))
    else:
        if Path(sys.prefix) == VENV:  # the environment's own Python cannot make the environment anew
            base = getattr(sys, "_base_executable", sys.executable)
            os.execv(base, [base, str(ROOT / "start.py"), *words])  # noqa: S606 - no shell is wanted
        prepare(level)
        python = str(PYTHON)
        # Launchers such as msrun take the first `python` they find.
        environment["PATH"] = os.pathsep.join([str(PYTHON.parent), environment.get("PATH", os.defpath)])
        environment["VIRTUAL_ENV"] = str(VENV)
    if level == "main":
        command = [python, "-m", "hyper_parallel", *(words or ["demo"])]
        os.execve(python, command, environment)  # noqa: S606 - no shell is wanted
    environment.setdefault("GLOG_v", "3")  # MindSpore: errors only
    environment.setdefault("NO_MKDOCS_2_WARNING", "1")  # a page about the future of MkDocs in every build
    if ONEDNN_VARIABLE not in environment and needs_onednn_cure(python, environment, is_cached=not is_here):
        print(f"bfloat16 on this CPU needs {ONEDNN_VARIABLE}={ONEDNN_CURE}: set for these checks.")
        environment[ONEDNN_VARIABLE] = ONEDNN_CURE
    return run_checks(python, environment, words[1:], is_here)


def check_python(version: tuple[int, ...]) -> None:
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        needed = f"{dotted(OLDEST_PYTHON)} to {dotted(NEWEST_PYTHON)}"
        do = "Run start.py with one of these, for example: python3.11 start.py"
        sys.exit(f"hyper-parallel needs Python {needed}; this is {dotted(version)}.\n{do}")


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def is_recent_enough(torch: str) -> bool:
    found = re.match(r"(\d+)\.(\d+)", torch)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH


def requirements(level: str, python: tuple[int, ...]) -> list[str]:
    """What pip is asked for after PyTorch, besides this package itself."""
    return MINDSPORE if level == "test" and python[:2] <= NEWEST_MINDSPORE_PYTHON else []


def stamp(level: str, python: tuple[int, ...], pyproject: str) -> str:
    """Changes with anything that an environment of this level is made of."""
    parts = [level, dotted(python), pyproject, TORCH, EXTRAS[level], *requirements(level, python)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def diagnose(log: str) -> str:
    """One thing to do about a failed installation."""
    if re.search(r"No space left|Errno 28|Disk quota exceeded", log):
        return f"The disk is full: free some gigabytes for {VENV} and for the temporary folder, then run this again."
    if re.search(r"ConnectionError|name resolution|timed out|Timeout|ProxyError|SSLError|unreachable", log):
        return "No package index can be reached: go online, or use this Python's own packages: python3 start.py --here"
    if re.search(r"No matching distribution|different Python|Requires-Python", log):
        return "No index in reach has a build for this Python: check the network, or try another: python3.11 start.py"
    return f"The lines above say why. To begin from nothing, delete {VENV} and run this again."


def selected_checks(arguments: list[str]) -> list[list[str]]:
    """All checks without arguments (or with `-x` alone), else pytest with them."""
    if arguments and arguments != ["-x"]:
        return [["pytest", *arguments]]
    return [[*check.split(), *(arguments if check == "pytest" else [])] for check in CHECKS]


def workers() -> list[str]:
    """pytest's tests in several processes, where that can be: in two on two cores they need half the time."""
    return ["-n", str(min(os.cpu_count() or 1, 4)), "--dist", "worksteal"]


def prepare(level: str) -> None:
    """Make .venv hold what the level needs: nothing to do, packages to install, or everything to make anew."""
    python, torch = sys.version_info[:2], find_torch()
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    stamps = {one: stamp(one, python, pyproject) for one in EXTRAS}

    def is_ready() -> bool:
        is_whole = why_anew(python, torch) is None and STAMPS[level].exists()
        return is_whole and STAMPS[level].read_text() == stamps[level]

    if is_ready():
        return
    is_ours = VENV.is_dir() and (MARKER.exists() or not any(VENV.iterdir()))
    if os.path.lexists(str(VENV)) and not is_ours:
        do = f"Move it away, or use it as it is: {PYTHON} start.py --here"
        sys.exit(f"{VENV} was not made by start.py, which therefore leaves it alone.\n{do}")
    with locked():
        if is_ready():  # another start has just done it
            return
        make_venv(why_anew(python, torch))
        UNFINISHED.touch()
        install(level, python, torch)
        UNFINISHED.unlink()
        for one in ["main", level]:  # what the tests need includes what the main job needs
            STAMPS[one].write_text(stamps[one])


def why_anew(python: tuple[int, ...], torch: str) -> str | None:
    """Why the environment cannot be kept, empty if there is none; None if it can."""
    config = VENV / "pyvenv.cfg"
    if UNFINISHED.exists():
        return "the last installation was interrupted"
    if not (MARKER.exists() and config.exists()):
        return ""
    if MARKER.read_text() != str(ROOT):
        return "the one there was made for another folder"
    found = re.search(r"^version\w* *= *(\d+\.\d+)", config.read_text(), re.MULTILINE)
    if not PYTHON.exists() or found is None:
        return "the one there has lost its Python"
    if found[1] != dotted(python):
        return f"the one there is for Python {found[1]}"
    known, used = TORCH_FOLDERS.read_text().split("\n") if TORCH_FOLDERS.exists() else (torch, "")
    if torch not in ("", known):
        return f"this Python has a PyTorch, and the one there uses that of {used}"
    return "its PyTorch is gone" if used and not Path(used, "torch").exists() else None


def make_venv(why: str | None) -> None:
    if why is None:
        return
    python = dotted(sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401 - Debian ships Python without it, and then `venv` does not work
        import venv
    except ImportError:
        do = f"Install what it lacks; on Debian and Ubuntu: apt install python{python}-venv"
        sys.exit(f"This Python cannot make virtual environments.\n{do}")
    for path in VENV.iterdir():
        if path != MARKER:  # others may be waiting for its lock
            shutil.rmtree(str(path)) if path.is_dir() and not path.is_symlink() else path.unlink()
    MARKER.write_text(str(ROOT))
    UNFINISHED.touch()
    with step(f"Making a virtual environment for Python {python} in .venv" + (f" ({why})" if why else "")):
        try:
            venv.create(str(VENV), with_pip=True, symlinks=True)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"The virtual environment could not be made: {error}\n{diagnose(str(error))}")


def find_torch() -> str:
    """The folder of a PyTorch that this Python has and that is recent enough; empty without one."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution("torch")
    except PackageNotFoundError:
        return ""
    return str(Path(str(found.locate_file("")))) if is_recent_enough(found.version) else ""


def install(level: str, python: tuple[int, ...], torch: str) -> None:
    folder = next((VENV / "lib").glob("python*/site-packages"))
    used = str(folder)
    if torch and subprocess.call([sys.executable, "-c", "import torch"], stderr=subprocess.DEVNULL) == 0:
        used = torch
        print(f"Using the PyTorch of {sys.executable}", flush=True)
        # `addsitedir` and not the bare path: that folder may have .pth files of its own.
        (folder / "torch-from-outside.pth").write_text(f"import site; site.addsitedir({torch!r})\n")
    else:
        index = os.environ.get(TORCH_INDEX_VARIABLE, "")
        hint = "" if index or shutil.which("nvidia-smi") else f" (for a CPU build set {TORCH_INDEX_VARIABLE})"
        pip(f"Installing PyTorch {TORCH}{hint}", [f"torch=={TORCH}", *(["--index-url", index] if index else [])])
    ask = "from importlib.metadata import version; print(version('torch'))"
    version = subprocess.check_output([str(PYTHON), "-c", ask], universal_newlines=True).strip()
    CONSTRAINTS.write_text(f"torch=={version}\n")  # no later step may replace it
    TORCH_FOLDERS.write_text(f"{torch}\n{used}")
    more = requirements(level, python)
    if level == "test" and not more:
        print(f"MindSpore has no wheels for Python {dotted(python)}: its tests are left out.", flush=True)
    what = {"main": "", "test": ", the test tools" + " and MindSpore" * bool(more)}[level]
    pip(f"Installing hyper-parallel{what}", ["-c", str(CONSTRAINTS), "-e", f".[{EXTRAS[level]}]", *more])


def pip(what: str, arguments: list[str]) -> None:
    command = [str(PYTHON), "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *arguments]
    with step(what), PIP_LOG.open("w") as log:
        return_code = subprocess.call(command, cwd=str(ROOT), stdout=log, stderr=subprocess.STDOUT)
    if return_code != 0:
        text = PIP_LOG.read_text(errors="replace")
        UNFINISHED.unlink()  # pip ended by itself and has cleaned up: the next start can go on from here
        sys.exit(
            "\n".join([*text.splitlines()[-12:], f"{what}: pip failed; all it said is in {PIP_LOG}", diagnose(text)])
        )


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    start = time.monotonic()
    print(f"{what} …", flush=True)
    yield
    print(f"  {time.monotonic() - start:.0f} s", flush=True)


@contextlib.contextmanager
def locked() -> Iterator[None]:
    VENV.mkdir(exist_ok=True)
    with MARKER.open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                print("Another start.py is installing here; waiting for it …", flush=True)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_checks(python: str, environment: dict[str, str], arguments: list[str], is_here: bool) -> int:
    failed = []
    for command in selected_checks(arguments):
        name = " ".join(command)
        if command == ["pytest"] and not is_here:
            command = [*command, *workers()]
            environment = {**environment, "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
        is_optional = is_here and command[0] != "pytest"
        if is_optional and subprocess.call([python, "-c", f"import {command[0]}"], stderr=subprocess.DEVNULL) != 0:
            print(f"== {name}: left out, {command[0]} is not installed here\n", flush=True)
            continue
        print(f"== {name}", flush=True)
        start = time.monotonic()
        is_good = subprocess.call([python, "-m", *command], env=environment, cwd=str(ROOT)) == 0
        print(f"== {name}: {'passed' if is_good else 'FAILED'} in {time.monotonic() - start:.1f} s\n", flush=True)
        failed += [] if is_good else [name]
        if failed and arguments == ["-x"]:
            break
    print(f"Failed: {'; '.join(failed)}" if failed else "All passed.")
    return 1 if failed else 0


def needs_onednn_cure(python: str, environment: dict[str, str], is_cached: bool) -> bool:
    """Whether a bfloat16 matrix product kills PyTorch on this CPU; with a cache, tried once per CPU and PyTorch."""
    cpu, cache = Path("/proc/cpuinfo"), VENV / "bfloat16"
    about = re.findall(r"^(?:model name|flags)\s*:.*$", cpu.read_text() if cpu.exists() else "", re.MULTILINE)[:2]
    key = hashlib.sha256("\n".join([*about, CONSTRAINTS.read_text() if is_cached else ""]).encode()).hexdigest()
    known = cache.read_text().split() if is_cached and cache.exists() else []
    if known[:1] == [key]:
        return known[1:] == ["dies"]
    probe = [python, "-m", "hyper_parallel.platform.torch.probe", "--bfloat16"]
    return_code = subprocess.call(probe, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if is_cached and return_code <= 0:  # an ordinary error says nothing about the CPU
        cache.write_text(f"{key} {'dies' if return_code < 0 else 'works'}")
    return return_code < 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. The next start repairs what was left unfinished.")
