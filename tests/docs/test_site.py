"""The documentation as a site and as files: it builds without a warning, needs no network, has no dead link and no stale figure."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

import hyper_parallel

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

if not DOCS.is_dir():
    pytest.skip("no documentation here: not a checkout", allow_module_level=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


class Loaded(HTMLParser):
    """What a browser fetches to show a page, as opposed to what a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag == "link" and values.get("rel") != "canonical":
            self.addresses.append(values.get("href") or "")
        elif tag in ("script", "img", "iframe", "source", "video"):
            self.addresses.append(values.get("src") or "")


def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        reader = Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        outside = [each for each in reader.addresses if re.match(r"(https?:)?//", each)]
        assert outside == [], f"{page.name} loads {outside}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_no_mark_of_a_measured_table_is_left_in_a_page(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert "<!-- measured" not in page.read_text(encoding="utf-8"), page


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    anchors = {name.rpartition(".")[2] for name in re.findall(r'id="(hyper_parallel\.[\w.]+)"', text)}
    modules = {"__version__", "policies"}  # no object of their own; what is in `policies` is listed
    assert set(hyper_parallel.__all__) - modules - anchors == set()


def test_pictures_are_there_and_small() -> None:
    pictures = list((DOCS / "pictures").glob("*.png"))
    assert {path.stem for path in pictures} >= {"demo", "report-light", "report-dark", "report-phone"}
    for path in pictures:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG"), path
        assert len(data) < 300_000, f"{path.name}: {len(data)} bytes"
        width = int.from_bytes(data[16:20], "big")
        assert width < 700 if path.stem == "report-phone" else width >= 700, f"{path.name} is {width} wide"


FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md")]
FILES += sorted([*DOCS.rglob("*.md"), *(ROOT / "src").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")])


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors_of(page: Path) -> set[str]:
    """Of its headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def dead_links(page: Path) -> list[str]:
    dead = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors_of(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead_links(page) == []


def test_a_dead_link_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A head, and more\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](gone.md) [c](there.md#a-head-and-more) [d](there.md#no) [e](https://x.y) `[f](no)`\n"
    )
    assert dead_links(page) == ["gone.md", "there.md#no"]


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    path = DOCS / "hooks" / "measured.py"
    spec = importlib.util.spec_from_file_location("measured_of_the_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_the_readmes_table_is_what_was_measured(measured: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert measured.summary() in text, "run: python docs/hooks/measured.py"
    assert measured.readme_with_what_was_measured(text) == text
    changed = text.replace(measured.summary(), "| nothing |")
    assert measured.readme_with_what_was_measured(changed) == text


def test_a_test_that_is_gone_cannot_stay_among_the_promises(
    measured: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    promised = measured.promised
    gone = promised.SHOWN[0]._replace(test="test_that_was_renamed")
    monkeypatch.setattr(promised, "SHOWN", [gone])
    with pytest.raises(LookupError, match="test_that_was_renamed"):
        promised.rows()


def test_the_readme_is_short_and_has_exactly_two_commands_to_set_up() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 750, "three minutes"
    assert re.findall(r"^python3 start\.py.*$", text, re.MULTILINE) == ["python3 start.py", "python3 start.py test"]


def test_every_command_and_every_setting_is_on_its_page() -> None:
    pytest.importorskip("typer")
    from hyper_parallel.cli.app import app

    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    names = [each.name or getattr(each.callback, "__name__", "") for each in app.registered_commands]
    assert len(names) > 5
    assert [name for name in names if f"| `hyper-parallel {name}" not in page] == []
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    settings = [
        each.name
        for each in inspect.signature(hyper_parallel.configure_swap).parameters.values()
        if each.kind is each.KEYWORD_ONLY
    ]
    assert len(settings) > 5
    assert [name for name in settings if f"`{name}`" not in page] == []


def test_the_tests_that_the_page_of_combinations_names_are_there() -> None:
    named = set(re.findall(r"`(\w+\.py)`", (DOCS / "combinations.md").read_text(encoding="utf-8")))
    there = {
        path.name
        for folder in ("tests/activation", "tests/planner", "tests/parallel", "benchmarks")
        for path in (ROOT / folder).glob("*.py")
    }
    assert len(named) > 10
    assert named - there == set()
