"""The page of a plan: what it shows are the plan's numbers, everybody can read it, and it needs nothing but itself."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy", reason="the solver is in SciPy")

from hyper_parallel.core.planner.model.choices import kept_bytes, recomputed_bytes, swapped_bytes
from hyper_parallel.core.planner.plan.budget_curve import budget_curve
from hyper_parallel.core.planner.plan.plan import Measured, MemoryPlan
from hyper_parallel.core.planner.plan.proof import first_margin, solved
from hyper_parallel.core.planner.search import choosing
from hyper_parallel.core.planner.search.choosing import timeline_under
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.report.numbers import Numbers, numbers_of
from hyper_parallel.report.page import page, write_report
from hyper_parallel.report.stacks import MAX_GROUPS
from support import planner_cases as cases

_VOID = {"meta", "input", "br"}


class Document(HTMLParser):
    """What is on a page: tags that fit together, ids, tables by their caption, terms and what they are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.terms: dict[str, str] = {}
        self._rows: list[list[str]] = []
        self._text = self._term = self._caption = ""
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if dict(attrs).get("id"):
            self.ids.append(dict(attrs)["id"])
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        if tag == "tr":
            self._rows.append([])
        self._text = ""

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())
        if tag in ("td", "th"):
            self._rows[-1].append(self._text)
        elif tag == "caption":
            self._caption = self._text
        elif tag == "table":
            self.tables[self._caption] = self._rows
        elif tag == "dt":
            self._term = self._text
        elif tag == "dd":
            before = self.terms.get(self._term)
            self.terms[self._term] = self._text if before is None else f"{before}, {self._text}"

    def handle_data(self, data: str) -> None:
        self._text += data


def planned(part: float = 0.2, name: str = "Llama", num_blocks: int = 12) -> MemoryPlan:
    profile = cases.as_measured(cases.transformer(num_blocks, differ=False))
    profile = cases.measured_of(profile, model=name, framework="torch", version="2.13")
    budget = profile.base_bytes + int(part * profile.activation_peak_bytes)
    plan = solved(profile, budget, margin_bytes=first_margin(profile), time_limit_s=cases.NO_HURRY)
    plan.measured = Measured(plan.predicted.peak_bytes - 100_000_000, 2345.6, 1000.0)
    return plan


@pytest.fixture(scope="module")
def numbers() -> Numbers:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "_POLISH_S", 0.0)  # polishing to its end would take minutes
        return numbers_of(planned(), curve_seconds=8 * cases.NO_HURRY)


@pytest.fixture(scope="module")
def text(numbers: Numbers) -> str:
    return page(numbers, [("a note", "of the caller")])


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_the_numbers_of_the_plan_and_of_its_json(numbers: Numbers, text: str, tmp_path: Path) -> None:
    plan = numbers.plan
    plan.save(tmp_path / "plan.json")
    saved, data, shown = json.loads((tmp_path / "plan.json").read_text()), data_of(text), Document(text)
    for name in ("budget_bytes", "predicted", "measured", "gap", "setting", "host"):
        assert data[name] == saved[name], name
    assert data["plain"] == {name: saved["profile"][name] for name in ("peak_bytes", "step_ms")}
    terms = shown.terms
    assert terms["budget"] == format_size(saved["budget_bytes"])
    assert terms["plain peak"] == format_size(saved["profile"]["peak_bytes"])
    peak = [format_size(saved[name]["peak_bytes"]) for name in ("measured", "predicted")]
    assert terms["plain step"] == "1000.0 ms"
    assert terms["peak with the plan"] == f"{peak[0]}, measured; predicted {peak[1]}"
    ratios = [saved["measured"]["step_ms"] / 1000, saved["predicted"]["step_ms"] / saved["profile"]["step_ms"]]
    assert terms["step with the plan"] == f"2345.6 ms, measured: {ratios[0]:.2f} of plain; predicted {ratios[1]:.2f}"
    assert terms["a note"] == "of the caller"


def test_the_table_of_blocks_is_that_of_the_json_and_of_the_decision(numbers: Numbers, text: str) -> None:
    data, shown = data_of(text), Document(text)
    plan = numbers.plan
    for block, region, decision in zip(data["blocks"], plan.profile.regions, plan.decision, strict=True):
        sums = [block[name] for name in ("saved_bytes", "swapped_bytes", "recomputed_bytes")]
        assert sums == [each(region, decision) for each in (kept_bytes, swapped_bytes, recomputed_bytes)]
        for name in ("saved_bytes", "swapped_bytes", "recomputed_bytes"):
            assert sum(module[name] for module in block["modules"]) == block[name], (block["name"], name)
    rows = {row[0]: row[1:] for row in shown.tables["What each block keeps, swaps and recomputes"][1:]}
    names = [block["name"] for block in data["blocks"]]
    covered = []
    for name, cells in rows.items():
        first, _, last = name.partition(" to ")
        for at in range(names.index(first), names.index(last or first) + 1):
            covered.append(names[at])
            block = data["blocks"][at]
            sizes = [format_size(block[each]) for each in ("saved_bytes", "swapped_bytes", "recomputed_bytes")]
            assert cells == [*sizes, f"{block['recompute_ms']:.2f}"]
    assert covered == names


def test_the_picture_has_the_peak_of_the_timeline_and_both_stacks_the_same_sum(numbers: Numbers, text: str) -> None:
    plan, data = numbers.plan, data_of(text)
    timeline = timeline_under(plan.profile, plan.decision, plan.setting)
    assert data["after"]["peak_bytes"] == timeline.peak_bytes
    assert plan.has_swaps
    assert data["after"]["step_ms"] == pytest.approx(plan.predicted.step_ms), (
        "the picture is of the step that is predicted"
    )
    for step in (data["before"], data["after"]):
        moments = step["moments"]
        by_choice, by_block = (
            [sum(c) for c in zip(*moments[view].values(), strict=True)] for view in ("by_choice", "by_block")
        )
        assert by_choice == by_block
        assert max(by_choice) == step["peak_bytes"]
        assert moments["ms"] == sorted(moments["ms"])
        assert step["step_ms"] == pytest.approx(step["forward_ms"] + step["turn_ms"] + step["backward_ms"])
    assert len(data["after"]["moments"]["by_block"]) <= MAX_GROUPS + 2
    copied = {d: sum(c.num_bytes for c in timeline.copies if c.direction == d) for d in ("offload", "load")}
    assert (data["copies"]["out_bytes"], data["copies"]["back_bytes"]) == (copied["offload"], copied["load"])
    assert data["copies"]["wait_ms"] == pytest.approx(sum(stall.ms for stall in timeline.stalls))


def test_the_curve_falls_from_the_smallest_budget_to_the_plain_step_and_has_this_plan_on_it(
    numbers: Numbers, text: str
) -> None:
    plan, points = numbers.plan, data_of(text)["curve"]
    assert len(points) == 8
    assert points[-1] == {
        "budget_bytes": plan.profile.peak_bytes,
        "peak_bytes": plan.profile.peak_bytes,
        "step_ms": plan.profile.step_ms,
    }
    for left, right in itertools.pairwise(points):
        assert left["budget_bytes"] < right["budget_bytes"]
        assert left["step_ms"] >= right["step_ms"]
        assert left["peak_bytes"] <= left["budget_bytes"]
    below = [point for point in points if point["budget_bytes"] <= plan.budget_bytes]
    above = [point for point in points if point["budget_bytes"] >= plan.budget_bytes]
    assert above[0]["step_ms"] <= plan.predicted.step_ms
    assert plan.predicted.step_ms <= below[-1]["step_ms"] * 1.001
    rows = Document(text).tables["Predicted step time by budget"][1:]
    assert [row[0] for row in rows[:-1]] == [format_size(point["budget_bytes"]) for point in points]
    assert rows[-1][0] == f"{format_size(plan.budget_bytes)} (this plan)"
    assert rows[-1][1:3] == [format_size(plan.predicted.peak_bytes), f"{plan.predicted.step_ms:.1f}"]


def test_a_curve_without_time_has_its_upper_end() -> None:
    profile = cases.transformer(3, differ=False)
    points = budget_curve(profile, time_limit_s=0.0)
    assert [point.budget_bytes for point in points] == [profile.peak_bytes]


# -- for everybody ------------------------------------------------------------------------------------------------------------------


def test_nothing_comes_from_the_network(text: str) -> None:
    # What is prose or data may speak of anything; what a browser would fetch may not be there.
    assert "http" not in text
    assert not re.search(r"@import|url\(", text)
    for tag, attributes in Document(text).tags:
        assert tag not in ("link", "img", "iframe", "base"), tag
        assert not {"src", "href"} & attributes.keys(), (tag, attributes)


def test_ids_are_unique_and_every_picture_has_words_and_a_table(text: str) -> None:
    shown = Document(text)
    assert len(shown.ids) == len(set(shown.ids))
    labelled = [attributes.get("aria-labelledby") for _, attributes in shown.tags if "aria-labelledby" in attributes]
    assert set(labelled) <= set(shown.ids)
    pictures = [attributes for _, attributes in shown.tags if attributes.get("role") == "img"]
    assert len(pictures) == 6, "before, after, three lanes, the curve"
    assert all(attributes.get("aria-label") for attributes in pictures)
    assert all(attributes["aria-hidden"] == "true" for tag, attributes in shown.tags if tag == "svg")
    assert text.count("The same as a table") == 3
    for tag, attributes in shown.tags:
        if tag == "input":
            assert f'for="{attributes["id"]}"' in text, "every control has a label"


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_stand_out_from_the_page(text: str, theme: str) -> None:
    """The ratios of WCAG 2.2: 4.5 for text, 3 for what a picture is made of."""
    sets = re.findall(r":root \{(.*?)\}", text, re.S)
    assert len(sets) == 2
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", sets[theme == "dark"]))
    for name in ("text", "soft"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    pictured = [name for name in colours if name not in ("text", "soft", "page", "card", "line")]
    assert len(pictured) == 8 + MAX_GROUPS
    for name in pictured:
        assert contrast(colours[name], colours["page"]) >= 3, (name, contrast(colours[name], colours["page"]))


def test_names_of_a_model_are_text_and_never_markup() -> None:
    name = '</script><script>alert("x")</script>'
    text = page(numbers_of(planned(0.7, name, num_blocks=3), curve_seconds=0.0), [(name, name)])
    Document(text)
    assert "<script>alert" not in text
    assert data_of(text)["model"] == name


def test_an_empty_plan_has_one_picture_and_says_that_nothing_is_changed(tmp_path: Path) -> None:
    plan = planned(part=2.0, num_blocks=3)
    assert plan.is_empty
    written = write_report(plan, tmp_path / "page.html").read_text()
    assert "Nothing is changed" in written
    assert written.count("<figcaption>") == 1
    assert "Copies out and back" not in written


def test_a_plan_has_one_peak_and_where_another_number_is_shown_the_page_says_which(numbers: Numbers, text: str) -> None:
    plan, paragraphs = numbers.plan, re.findall(r"<p>(.*?)</p>", text)
    assert plan.measured is not None
    drawn, measured, predicted = map(
        format_size, (numbers.after.peak_bytes, plan.measured.peak_bytes, plan.predicted.peak_bytes)
    )
    said = next(words for words in paragraphs if words.startswith("Drawn from the profile"))
    assert f"The picture shows {drawn} of the {measured} that were measured" in said
    assert f"The predicted {predicted} are a bound" in said
    assert paragraphs[0].endswith("the step takes 2.35 times as long (measured).")
    assert drawn not in "".join(re.findall(r"<figcaption>.*?</figcaption>|class=\"mark.*?</span>", text))


def test_the_page_says_why_a_step_is_slower_than_predicted_and_where_values_go(numbers: Numbers) -> None:
    def page_on(device: str) -> str:
        plan = copy.copy(numbers.plan)
        plan.__dict__.pop("host", None)  # which was worked out for the other device
        plan.profile = cases.measured_of(plan.profile, device=device)
        return page(dataclasses.replace(numbers, plan=plan), [])

    on_cpu, elsewhere = page_on("cpu"), page_on("cuda: H200")
    assert "Slower than predicted: 2.35 of plain" in on_cpu
    assert "On a CPU copies and compute share the cores" in on_cpu
    assert " go to files in forward" in on_cpu
    assert "On a CPU copies" not in elsewhere
    assert " go to the host in forward" in elsewhere


def test_the_curve_marks_what_was_measured_beside_what_was_predicted(numbers: Numbers, text: str) -> None:
    curve = text[text.index('id="h-curve"') :]
    assert "this plan, measured: 2.346" in curve
    assert f"this plan, predicted: {numbers.plan.predicted_to_plain:.3f}" in curve
    marks = re.findall(r'class="mark (\w+)" style="left:([\d.]+)%;bottom:([\d.]+)%"', curve)
    places = {css: (float(left), float(bottom)) for css, left, bottom in marks}
    assert places["mine"][0] == places["measured"][0]
    assert places["mine"][1] < places["measured"][1] <= 100


def test_a_plan_that_swaps_nothing_has_no_lanes() -> None:
    profile = dataclasses.replace(cases.transformer(3, differ=False), link=None)
    budget = profile.base_bytes + profile.activation_peak_bytes // 2
    plan = solved(profile, budget, margin_bytes=first_margin(profile), time_limit_s=cases.NO_HURRY)
    assert not plan.has_swaps
    assert "Copies out and back" not in page(numbers_of(plan), [])


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium here")
def test_a_browser_shows_the_numbers_at_the_peak_and_has_nothing_to_complain_about(
    numbers: Numbers, text: str, tmp_path: Path
) -> None:
    (tmp_path / "page.html").write_text(text)
    command = [
        "chromium",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    done = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{tmp_path / 'page.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    assert '<div class="slider">' in done.stdout, "the script has run"
    table = re.search(r'<table id="moment-table">(.*?)</table>', done.stdout, re.S)
    assert table is not None
    last = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", table[1])[-3:]
    assert last[0] == "all"
    assert last[2] == format_size(numbers.after.peak_bytes)
