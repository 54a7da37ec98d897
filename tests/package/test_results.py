"""Results of benchmarks name their commit, and are shown as stale when the sources have changed since."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "results_state.py"

if not SCRIPT.exists():
    pytest.skip("no benchmarks here: not a checkout", allow_module_level=True)


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("results_state", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


results_state = _load()


class Checkout:
    """A copy of the command and of the watched sources, without a history."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "benchmarks" / "results").mkdir(parents=True)
        shutil.copy(SCRIPT, root / "benchmarks")
        for watched in results_state.WATCHED:
            shutil.copytree(ROOT / watched, root / watched, ignore=shutil.ignore_patterns("__pycache__"))

    def write(self, name: str, content: object) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        (self.root / "benchmarks" / "results" / name).write_text(text)

    def states(self) -> dict[str, str]:
        return {each.name: each.state for each in results_state.states(self.root)}

    def change(self, file: str = "src/hyper_parallel/core/swap/engine.py") -> None:
        with (self.root / file).open("a") as source:
            source.write("\n# changed\n")

    def git(self, *arguments: str) -> str:
        names = ("-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *names, *arguments], cwd=self.root, capture_output=True, text=True, check=True)  # noqa: S607
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("init", "--quiet")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "all")
        return self.git("rev-parse", "--short", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def run_command(script: Path) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_names_every_results_file() -> None:
    pytest.importorskip("rich")
    files = [file.name for file in (ROOT / "benchmarks" / "results").rglob("*") if file.suffix in (".json", ".md")]
    shown = run_command(SCRIPT)
    assert files
    for name in files:
        line = next(line for line in shown.splitlines() if f" {name} " in line)
        assert any(state in line for state in ("fresh", "stale", "unknown"))


def test_every_results_file_names_its_commit() -> None:
    assert [each.name for each in results_state.states() if not each.commits] == []


def test_a_changed_source_turns_fresh_into_stale(checkout: Checkout) -> None:
    pytest.importorskip("rich")
    checkout.write("a.json", {"commit": "0123abc", "digest": results_state.digest(checkout.root)})
    checkout.write("b.md", f"Commit 0123abc, digest `{results_state.digest(checkout.root)}`.")
    assert checkout.states() == {"a.json": "fresh", "b.md": "fresh"}
    assert run_command(checkout.root / "benchmarks" / "results_state.py").count("fresh") == 2
    checkout.change()
    assert checkout.states() == {"a.json": "stale", "b.md": "stale"}
    assert run_command(checkout.root / "benchmarks" / "results_state.py").count("stale") == 2


@pytest.mark.parametrize("watched", results_state.WATCHED)
def test_a_new_file_in_any_watched_folder_makes_results_stale(checkout: Checkout, watched: str) -> None:
    checkout.write("a.json", {"commit": "0123abc", "digest": results_state.digest(checkout.root)})
    (checkout.root / watched / "new.py").write_text("")
    assert checkout.states() == {"a.json": "stale"}


def test_a_renamed_file_makes_results_stale_and_a_note_beside_the_sources_does_not(checkout: Checkout) -> None:
    checkout.write("a.json", {"commit": "0123abc", "digest": results_state.digest(checkout.root)})
    checkout.change("src/hyper_parallel/core/swap/README.md")
    assert checkout.states() == {"a.json": "fresh"}
    folder = checkout.root / "src/hyper_parallel/core/swap"
    (folder / "engine.py").rename(folder / "engine2.py")
    assert checkout.states() == {"a.json": "stale"}


def test_a_part_of_another_commit_makes_results_stale_and_is_named(checkout: Checkout) -> None:
    now = {"commit": "0123abc", "digest": results_state.digest(checkout.root)}
    then = {"commit": "4567def", "digest": "0" * 64}
    checkout.write("a.json", {**now, "measured": {"new": now}})
    checkout.write("b.json", {**now, "measured": {"new": now, "old": then}})
    fresh, stale = results_state.states(checkout.root)
    assert (fresh.state, fresh.commits) == ("fresh", ("0123abc",))
    assert (stale.state, stale.commits) == ("stale", ("0123abc", "4567def"))


def test_results_may_watch_less(checkout: Checkout) -> None:
    watched = ["src/hyper_parallel/core/swap/pool.py", "src/hyper_parallel/core/activation_checkpoint"]
    digest = results_state.digest(checkout.root, watched)
    checkout.write("a.json", {"commit": "0123abc", "digest": digest, "watched": watched})
    checkout.write("b.md", f"commit 0123abc, digest {digest}\n\nWatched: `{watched[0]}`, `{watched[1]}`\n")
    checkout.change()
    assert checkout.states() == {"a.json": "fresh", "b.md": "fresh"}
    checkout.change("src/hyper_parallel/core/swap/pool.py")
    assert checkout.states() == {"a.json": "stale", "b.md": "stale"}


@needs_git
def test_without_a_digest_git_is_asked(checkout: Checkout) -> None:
    commit = checkout.commit()
    checkout.write("a.json", {"commit": commit})
    checkout.write("b.md", f"Measured at commit {commit}.")
    checkout.write("c.md", f"| tests | commit |\n|---|---|\n| all | {commit} |\n")
    checkout.write("d.json", {"commit": commit, "watched": ["src/hyper_parallel/core/swap/pool.py"]})
    checkout.write("gone.json", {"commit": "0123abc"})
    checkout.write("none.md", "No word about it.")
    assert checkout.states() == {
        "a.json": "fresh", "b.md": "fresh", "c.md": "fresh", "d.json": "fresh", "gone.json": "unknown", "none.md": "unknown",
    }  # fmt: skip
    checkout.change("src/hyper_parallel/core/swap/README.md")
    assert checkout.states()["a.json"] == "fresh"
    checkout.change()
    assert checkout.states() == {
        "a.json": "stale", "b.md": "stale", "c.md": "stale", "d.json": "fresh", "gone.json": "unknown", "none.md": "unknown",
    }  # fmt: skip


def test_without_digest_and_repository_the_state_is_unknown(checkout: Checkout) -> None:
    checkout.write("a.json", {"commit": "0123abc"})
    checkout.write("b.json", {"commit": "--output=x", "digest": None})
    checkout.write("c.json", "no json")
    assert checkout.states() == {"a.json": "unknown", "b.json": "unknown", "c.json": "unknown"}
