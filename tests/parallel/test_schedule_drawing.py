"""The page of a schedule: whole, self-contained, and with what the simulation says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel import Schedule


class Page(HTMLParser):
    """What a page shows, and every address in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.bars: list[str] = []  # classes of rectangles
        self.titles: list[str] = []
        self.cells: list[str] = []
        self.addresses: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [value for name in ("src", "href", "xlink:href", "action") if (value := values.get(name))]
        if tag not in ("meta", "rect", "line", "path"):
            self.open.append(tag)
        if tag == "rect" and self.open[-1:] == ["g"]:
            self.bars.append((values.get("class") or "").split()[0])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert tag == "rect" or self.open.pop() == tag, f"{tag} does not end what is open: {self.open}"

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["title"]:
            self.titles.append(data)
        elif self.open[-1:] == ["td"]:
            self.cells.append(data)


MADE = [
    hp.schedules.gpipe(1, 1),
    hp.schedules.dualpipe(4, 8),
    hp.schedules.interleaved(2, 5, 5),
    hp.schedules.dualpipe_v(3, 7).lower(zero=3),
]


@pytest.mark.parametrize("schedule", MADE, ids=lambda schedule: schedule.name)
def test_a_page_has_every_action_and_needs_nothing_from_elsewhere(schedule: Schedule, tmp_path: Path) -> None:
    page = Page(schedule.draw(tmp_path / "page.html"))
    assert page.open == []
    assert page.addresses == []
    assert not re.search(r"https?:|url\((?!#)|@import|<script", (tmp_path / "page.html").read_text(encoding="utf-8"))
    parts = [
        part for actions in schedule.compute_only().ranks for action in actions for part in action.parts or (action,)
    ]
    assert sorted(page.bars) == sorted(part.kind.value for part in parts)
    timeline = schedule.simulate()
    kept = [f"{peak:.4g}" for peak in timeline.peak]
    assert page.cells[4::5] == kept
    assert page.cells[2::5] == [f"{idle:.4g}" for idle in timeline.idle]


def test_bars_say_what_they_are_and_idle_time_is_between_them(tmp_path: Path) -> None:
    page = Page(hp.schedules.one_f_one_b(2, 1).draw(tmp_path / "page.html", {"F": 1, "B": 2, "SEND_F": 0.5}))
    assert sorted(page.titles[1:]) == [
        "backward of microbatch 0 at stage 0: 4.5 to 6.5",
        "backward of microbatch 0 at stage 1: 2.5 to 4.5",
        "forward of microbatch 0 at stage 0: 0 to 1",
        "forward of microbatch 0 at stage 1: 1.5 to 2.5",
        "idle: 0 to 1.5",
        "idle: 1 to 4.5",
        "idle: 4.5 to 6.5",
    ]


def test_names_of_strangers_are_text(tmp_path: Path) -> None:
    path = Schedule.of([["0F0", "0B0"]], name="<script>alert(1)</script>").draw(tmp_path / "page.html")
    assert "<script" not in path.read_text(encoding="utf-8")


def test_a_page_that_cannot_be_made_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    with pytest.raises(ValueError, match="it needs the forward"):
        Schedule.of([["0B0", "0F0"]]).draw(path)
    with pytest.raises(ValueError, match="no cost of F"):
        hp.schedules.gpipe(1, 1).draw(path, {"F": -1})
    assert path.read_text() == "old"


def test_costs_of_nothing_and_very_unequal_ones_can_be_drawn(tmp_path: Path) -> None:
    for costs in ({"F": 0, "B": 0}, {"F": 1e-9, "B": 1e6}, {"F": [0, 1], "I": 0, "W": 1e-3}):
        assert Page(hp.schedules.gpipe(2, 2).draw(tmp_path / "page.html", costs)).open == []  # type: ignore[arg-type]
