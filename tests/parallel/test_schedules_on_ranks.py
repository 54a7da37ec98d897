"""What the check says of damaged schedules is what real processes show that follow them.

More of them: HYPER_PARALLEL_CAMPAIGN=full python3 start.py test tests/parallel/test_schedules_on_ranks.py
"""

from __future__ import annotations

import random
from collections import Counter

import hyper_parallel as hp
from support import pipelines, processes, schedule_processes
from support.campaign import share
from support.damaged_schedules import damaged, is_right, random_schedule

DEADLINE_S = 5.0  # of lists that wait for each other; all of a batch wait at the same time
BATCH = 64


def of_ranks(schedule: hp.Schedule) -> bool:
    """Whether anything is sent in a schedule of several ranks: processes have no other way to hand something on."""
    kinds = {action.kind.value for actions in schedule.ranks for action in actions}
    return len(schedule.ranks) > 1 and any(kind.startswith(("SEND", "RECV")) for kind in kinds)


def test_processes_that_follow_damaged_schedules_show_what_the_check_says() -> None:
    found = []
    for number in share(2_000, 90):
        seed = random.Random(f"processes {number}")
        _, schedule = damaged(random_schedule(seed), seed)
        if of_ranks(schedule):
            found.append((number, schedule))
    seen: Counter[bool] = Counter()
    for start in range(0, len(found), BATCH):
        part = found[start : start + BATCH]
        schedules = [schedule for _, schedule in part]
        ranks = processes.pool("torch", 4).run(schedule_processes.work, schedules, DEADLINE_S, deadline_s=60)
        for (number, schedule), outcomes in zip(part, zip(*ranks, strict=True), strict=True):
            seen[all(outcomes)] += 1
            assert is_right(schedule) == all(outcomes), f"case {number}: processes say {outcomes}\n{schedule}"
    assert min(seen.values()) >= 5, seen


def test_the_runtime_trains_with_damaged_schedules_that_still_work_and_begins_no_other() -> None:
    seen: Counter[bool] = Counter()
    for number in share(100, 10):
        seed = random.Random(f"runtime {number}")
        name = seed.choice(["gpipe", "one_f_one_b", "zb_h1", "zbv", "dualpipe_v"])
        what, schedule = damaged(getattr(hp.schedules, name)(2, 4), seed)
        works = is_right(schedule)
        seen[works] += 1
        for said in processes.pool("torch", 2).run(pipelines.train_by, schedule, deadline_s=60):
            assert (said == []) == works, f"case {number}, {what}: {said}\n{schedule}"
            assert works or said[0].startswith("ScheduleError")
    assert min(seen.values()) >= 2, seen
