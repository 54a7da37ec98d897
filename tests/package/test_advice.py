"""What we tell people to install is what is there."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def test_no_text_tells_anybody_to_install_a_package_of_our_name_which_nobody_has_registered() -> None:
    files = [*_ROOT.glob("src/**/*.py"), *_ROOT.glob("examples/*.py"), *_ROOT.glob("docs/**/*.md"), *_ROOT.glob("*.md")]
    assert len(files) > 300
    named = [str(each) for each in files if re.search(r"pip install [^\n`]*hyper[-_]parallel", each.read_text())]
    assert not named
