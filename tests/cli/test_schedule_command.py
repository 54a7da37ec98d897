"""`hyper-parallel schedule`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel.cli import app as command
from hyper_parallel.core.parallel.pipeline import schedules


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`run(words)`: exit code, standard output, standard error."""

    def call(words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hyper-parallel", "schedule", *words.split()])
        with pytest.raises(SystemExit) as ended:
            command.run()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


@pytest.mark.parametrize("name", schedules.__all__)
def test_every_schedule_can_be_had_by_its_name(run, name: str) -> None:
    code, out, err = run(f"{name.replace('_', '-')} -p 4 -m 8 --json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    sizes = (4, 8, 2) if name == "interleaved" else (4, 8)
    schedule = getattr(hp.schedules, name)(*sizes)
    timeline = schedule.simulate()
    assert (document["name"], document["ranks"], document["stages"], document["microbatches"]) == (
        name,
        4,
        schedule.num_stages,
        8,
    )
    assert document["bubble"] == timeline.bubble
    assert document["peak"] == list(timeline.peak)
    assert document["actions"] == [[str(action) for action in actions] for actions in schedule.ranks]


def test_the_page_of_the_docs_shows_what_is_printed(run) -> None:
    code, out, _ = run("zbv -p 4 -m 16 --draw page.html")
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert code == 0
    assert f"```text\n{out}```" in page
    assert Path("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_schedule_is_written_and_read_again_with_everything_in_it(run) -> None:
    code, out, _ = run("interleaved -p 2 -m 4 -v 3 --zero 3 --csv mine.csv --json")
    assert (code, json.loads(out)["csv"]) == (0, "mine.csv")
    assert hp.Schedule.load("mine.csv").ranks == hp.schedules.interleaved(2, 4, 3).lower(zero=3).ranks
    code, out, _ = run("mine.csv --cost F=1 --cost SEND_F=0.5 --draw page.html")
    assert code == 0
    assert out.startswith("mine: 2 ranks, 6 stages, 4 microbatches: complete, in order, free of deadlock\n")


def test_a_schedule_that_hangs_is_not_passed(run) -> None:
    Path("wrong.csv").write_text("0F0,0B0\n1B0,1F0\n")
    code, out, err = run("wrong.csv --draw page.html")
    assert (code, out) == (1, "")
    assert "- rank 1, position 0, 1B0: it needs the forward of microbatch 0 at stage 1 before it" in err
    assert "Traceback" not in err
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("dualpipe -p 4 -m 5", 1, "The nearest that works: m=8"), ("gpipe -p 0 -m 4", 1, "p is a number of things"),
        ("gpipe -p 4 -m 4 --zero 7", 1, "no such way to shard"), ("gpipe -p 4 -m 4 --cost G=1", 1, "nothing of this kind"),
        ("gpip -p 4 -m 4", 2, "There is no such schedule"), ("none.csv", 2, "There is no such file"), ("gpipe -p 4", 2, "gpipe needs -m (microbatches)"),
        ("gpipe", 2, "gpipe needs -p (ranks) and -m (microbatches)"), ("zbv -p 4 -m 4 -v 2", 2, "Leave -v out"), ("gpipe -p x -m 4", 2, "Error"),
        ("gpipe -p 4 -m 4 --cost F", 2, "KIND=TIME"), ("gpipe -p 4 -m 4 --draw none/page.html", 2, "Make the folder first"),
        ("gpipe -p 4 -m 4 --draw same.html --csv same.html", 2, "cannot be one file"), ("mine.csv -p 4", 2, "A file says itself"),
    ],
)  # fmt: skip
def test_mistakes_end_in_words_and_with_their_codes(run, words: str, code: int, said: str) -> None:
    ended, out, err = run(words)
    assert (ended, out) == (code, "")
    assert said in err
    assert "Traceback" not in err
