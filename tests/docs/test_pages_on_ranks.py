"""The pages on distributed tensors and pipelines say that their programs run under torchrun with two small changes: they do, and say what the pages say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support import documents, processes

pytest.importorskip("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs"

if not DOCS.is_dir():
    pytest.skip("no documentation here: not a checkout", allow_module_level=True)


@pytest.mark.parametrize(
    ("page", "one", "two", "said"),
    [
        ("distributed.md", '"cpu", (1, 1)', '"cpu", (1, 2)', ["1 collectives", "all_reduce"]),
        ("operator-rules.md", '"cpu", (1,)', '"cpu", (2,)', ["(Partial('sum'),)"]),
        ("sharded.md", "mine = slice(", "mine = slice(", ["Layout(dp, -) (8, 32)"]),
        ("checkpoints.md", "if ranks == 1", "if ranks == 2 and platform.get_rank() == 3", ["{'step': 2}"]),
        ("pipelines.md", "hp.schedules.zbv(p, 8)", "hp.schedules.zbv(2, 8)", ["complete, in order, free of deadlock"]),
    ],
)
def test_a_page_runs_on_two_ranks(page: str, one: str, two: str, said: list[str], tmp_path: Path) -> None:
    steps = documents.processes_of(documents.blocks_of(DOCS / page))[0]
    code = "\n".join(step.text for step in steps if step.kind == "python")
    for before, after in ((one, two), ("# platform.init_process_group()", "platform.init_process_group()")):
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    program = tmp_path / "page.py"
    # `out` is the result of the first function of the page on rules.
    last = "print(out.placements)" if page == "operator-rules.md" else ""
    program.write_text(f"import torch\ntorch.manual_seed(0)\n{code}\n{last}\nplatform.destroy_process_group()\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = processes.run_program([*launcher, str(program)], deadline_s=120, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert [each for each in said if output.count(each) != 2] == [], output
