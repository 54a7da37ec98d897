"""Lines that are wider than 120 characters, file by file.

    python tests/support/wide_lines.py            shows those that are not in the list
    python tests/support/wide_lines.py --write    shortens the list to what is there

`tests/data/wide_lines.json` lists the files that still have some, with how many. It only gets shorter: `--write` takes
off it what is gone, and refuses a file that has more than listed, or is not listed. Without a list it makes one.
`tests/package/test_prose.py` fails where the list and the files differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

MOST = 120
ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "data" / "wide_lines.json"
COMMAND = "python tests/support/wide_lines.py --write"
# Programs and pages that are held to it. Programs in `tests` and `benchmarks` are not, their pages are.
PATTERNS = (
    "src/**/*.py",
    "src/**/*.md",
    "docs/**/*.py",
    "docs/**/*.md",
    "tests/**/README.md",
    "benchmarks/README.md",
    "README.md",
    "CONTRIBUTING.md",
    "tests/package/test_prose.py",
    "tests/package/test_words.py",
    "tests/support/wide_lines.py",
)


def files(root: Path = ROOT) -> Iterator[Path]:
    yield from sorted({path for pattern in PATTERNS for path in root.glob(pattern)})


def wide_lines(path: Path) -> list[int]:
    """The numbers of a file's wide lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines, 1) if len(line) > MOST]


def counted(root: Path = ROOT) -> dict[str, int]:
    """How many wide lines each file has that has any."""
    found = {path.relative_to(root).as_posix(): len(wide_lines(path)) for path in files(root)}
    return {name: number for name, number in found.items() if number}


def listed(path: Path = LIST) -> dict[str, int]:
    found: dict[str, int] = json.loads(path.read_text())
    return found


def too_many(found: dict[str, int], allowed: dict[str, int], root: Path = ROOT) -> list[str]:
    """A line of text for each file that has more wide lines than the list says."""
    return [
        f"{name}: {number} lines are wider than {MOST} characters, {allowed.get(name, 0)} are listed; "
        f"the wide ones are {', '.join(map(str, wide_lines(root / name)))}"
        for name, number in found.items()
        if number > allowed.get(name, 0)
    ]


def too_few(found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    """A line of text for each file that has fewer wide lines than the list says: the list must follow."""
    return [
        f"{name}: {number} are listed, {found.get(name, 0)} are there; run `{COMMAND}`"
        for name, number in allowed.items()
        if number > found.get(name, 0)
    ]


def write(found: dict[str, int], path: Path = LIST, root: Path = ROOT) -> list[str]:
    """Shorten the list, or make it; what it refuses is returned, and stays in the list as it was."""
    allowed = listed(path) if path.exists() else found
    kept = {name: min(number, allowed[name]) for name, number in found.items() if name in allowed}
    path.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return too_many(found, allowed, root)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="shorten the list to what is there")
    found = counted()
    left = write(found) if parser.parse_args().write else too_many(found, listed())
    print("\n".join([*left, f"{sum(found.values())} wide lines in {len(found)} files"]))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
