"""The campaigns are not blind: each planted bug is found."""

from __future__ import annotations

import pytest

from support.planted_bugs import BUGS, REDUNDANT, Bug, changed_engine, find_planted, unchanged


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_campaign_finds(bug: Bug) -> None:
    found = find_planted(bug)
    assert found is not None, "nothing found: the campaign is blind here, or the line does nothing"
    print(found)


@pytest.mark.parametrize("campaign", sorted({bug.campaign for bug in BUGS}))
def test_the_campaign_finds_nothing_where_nothing_was_planted(campaign: str) -> None:
    assert find_planted(unchanged(campaign), num_seeds=200) is None


def test_there_are_at_least_twenty() -> None:
    assert len({bug.name for bug in BUGS}) >= 20


@pytest.mark.parametrize("bug", REDUNDANT, ids=lambda bug: bug.name)
def test_a_line_listed_as_redundant_is_still_there(bug: Bug) -> None:
    changed_engine(bug)
