"""Which results still speak of the code as it is now?

    python benchmarks/results_state.py

Lists every file of `benchmarks/results` with the commits it names, and whether the sources it watches (the swap engine and its glue, unless
it names others) are the same as then:

    fresh    the same
    stale    changed since: measure again before quoting it
    unknown  it names no commit, or one that is not in this repository, and has no digest

A results file has a digest of the watched sources: that needs no history. Older ones have a commit only, and git is asked.
In JSON these are `commit`, `digest` and `watched`; in Markdown "commit 0123abc" (or a column "commit" of a table), "digest 0123..." and a
line "Watched: path, path".
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]

WATCHED = (
    "src/hyper_parallel/core/activation_checkpoint",
    "src/hyper_parallel/core/regions",
    "src/hyper_parallel/core/swap",
    "src/hyper_parallel/platform/torch/regions",
    "src/hyper_parallel/platform/torch/swap",
    "src/hyper_parallel/platform/torch/wrappers",
)

_COMMIT = r"[0-9a-f]{7,40}"
_DIGEST = r"[0-9a-f]{64}"


class Claim(NamedTuple):
    """What a results file says of the sources it was made with."""

    commits: tuple[str, ...]
    digests: tuple[str, ...]
    watched: tuple[str, ...]


class State(NamedTuple):
    name: str
    commits: tuple[str, ...]
    state: str  # "fresh", "stale" or "unknown"
    why: str


def digest(root: Path = ROOT, watched: Iterable[str] = WATCHED) -> str:
    """SHA-256 over the names and contents of all Python files under the watched paths; notes beside them do not count."""
    files: set[Path] = set()
    for path in (root / each for each in watched):
        files.update([path] if path.is_file() else path.rglob("*.py"))
    whole = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        whole.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()


def earlier_results(path: Path, now: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """What an earlier run has written, if what it measured is the same in these things; else the end of the program, in words."""
    if not path.is_file():
        raise SystemExit(f"There is no file {path}; --out writes one.")
    earlier: dict[str, Any] = json.loads(path.read_text())
    for name in names:
        if earlier[name] != now[name]:
            raise SystemExit(
                f"{path} is of something else: its {name} is {earlier[name]!r}, not {now[name]!r}. Measure it again."
            )
    return earlier


def states(root: Path = ROOT) -> list[State]:
    """The state of every results file, by name."""
    folder = root / "benchmarks" / "results"
    return [_state(file, root) for file in sorted(folder.rglob("*")) if file.suffix in (".json", ".md")]


def _state(file: Path, root: Path) -> State:
    name = file.relative_to(root / "benchmarks" / "results").as_posix()
    text = file.read_text(encoding="utf-8")
    claim = _claim_of_json(text) if file.suffix == ".json" else _claim_of_markdown(text)
    if claim.digests:
        is_same = set(claim.digests) == {digest(root, claim.watched)}
        return State(name, claim.commits, "fresh" if is_same else "stale", "by its digest")
    return State(name, claim.commits, *_ask_git(root, claim))


def _claim_of_json(text: str) -> Claim:
    try:
        data: Any = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        return Claim((), (), WATCHED)
    measured = data.get("measured")  # parts of it that are of other commits
    parts = [data, *(measured.values() if isinstance(measured, dict) else ())]
    commits = dict.fromkeys(str(part.get("commit")) for part in parts)
    digests = dict.fromkeys(part.get("digest") for part in parts)
    watched = data.get("watched")
    return Claim(
        tuple(commit for commit in commits if re.fullmatch(_COMMIT, commit)),
        tuple(each for each in digests if isinstance(each, str)),
        tuple(map(str, watched)) if isinstance(watched, list) and watched else WATCHED,
    )


def _claim_of_markdown(text: str) -> Claim:
    commits = [*re.findall(rf"\b(?i:commit)[:\s]+`?({_COMMIT})\b", text), *_column("commit", text)]
    watched = re.search(r"^Watched: (.+)$", text, re.MULTILINE)
    return Claim(
        tuple(dict.fromkeys(commits)),
        tuple(re.findall(rf"\b(?i:digest)[:\s]+`?({_DIGEST})\b", text)),
        tuple(path.strip(" `.") for path in watched[1].split(",")) if watched else WATCHED,
    )


def _column(head: str, text: str) -> list[str]:
    """The commits in the columns of that name, in all tables."""
    found: list[str] = []
    column: int | None = None
    for line in text.splitlines():
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if column is None:
            column = cells.index(head) if head in cells else len(cells)  # the first line of a table names its columns
        elif column < len(cells):
            found += re.findall(rf"\b{_COMMIT}\b", cells[column])
    return found


def _ask_git(root: Path, claim: Claim) -> tuple[str, str]:
    if not claim.commits:
        return "unknown", "names no commit"
    git = shutil.which("git")
    if git is None:
        return "unknown", "no digest, and no git here"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True, check=False)

    top = run("rev-parse", "--show-toplevel")
    if top.returncode != 0 or Path(top.stdout.strip()).resolve() != root.resolve():
        return "unknown", "no digest, and not in a git repository"
    paths = [path if path.endswith(".py") else f":(glob){path}/**/*.py" for path in claim.watched]
    changed: list[str] = []
    for commit in claim.commits:
        if run("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
            return "unknown", f"{commit} is not in this repository"
        difference = run("diff", "--quiet", commit, "--", *paths).returncode
        if difference not in (0, 1):
            return "unknown", f"git could not compare with {commit}"
        if difference == 1:
            changed.append(commit)
    if changed:
        return "stale", f"sources changed since {', '.join(changed)}"
    return "fresh", "by git"


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Results in benchmarks/results")
    table.add_column("file", no_wrap=True)
    for head in ("commit", "state", "why"):
        table.add_column(head)
    colors = {"fresh": "green", "stale": "yellow", "unknown": "red"}
    for each in states():
        state = f"[{colors[each.state]}]{each.state}[/]"
        table.add_row(each.name, ", ".join(each.commits) or "none", state, each.why)
    Console().print(table)


if __name__ == "__main__":
    main()
