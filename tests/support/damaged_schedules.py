"""Random schedules that work, and what damage makes of them."""

from __future__ import annotations

import random
from dataclasses import replace

import hyper_parallel as hp
from hyper_parallel import Schedule, ScheduleError

NAMES = ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zbv", "dualpipe", "dualpipe_v"]


def random_schedule(seed: random.Random) -> Schedule:
    """A small schedule that works, of any kind, as compute actions or with everything."""
    name, p, m = seed.choice(NAMES), seed.randint(1, 4), seed.randint(1, 6)
    if name.startswith("dualpipe"):
        p = seed.choice([2, 4]) if name == "dualpipe" else p
        m = 2 * p + 2 * seed.randint(0, 1)
    sizes = (p, m, seed.randint(1, 3)) if name == "interleaved" else (p, m)
    schedule: Schedule = getattr(hp.schedules, name)(*sizes)
    return schedule if seed.random() < 0.2 else schedule.lower(zero=seed.randint(0, 3), prefetch=seed.randint(0, 2))


def damaged(schedule: Schedule, seed: random.Random) -> tuple[str, Schedule]:
    """The schedule with one action deleted, doubled, or moved, or two of them swapped. Often that does no harm."""
    lists = [list(actions) for actions in schedule.ranks]
    here = seed.choice([rank for rank, actions in enumerate(lists) if actions])
    there = here if seed.random() < 0.8 else seed.randrange(len(lists))
    at = seed.randrange(len(lists[here]))
    what = seed.choice(["delete", "double", "move", "swap", "swap neighbours"])
    if what == "delete":
        del lists[here][at]
    elif what == "double":
        lists[there].insert(seed.randint(0, len(lists[there])), lists[here][at])
    elif what == "move":
        action = lists[here].pop(at)
        lists[there].insert(seed.randint(0, len(lists[there])), action)
    else:
        other = (
            min(at + 1, len(lists[here]) - 1)
            if what == "swap neighbours"
            else seed.randrange(max(1, len(lists[there])))
        )
        there = here if what == "swap neighbours" else there
        if lists[there]:
            lists[here][at], lists[there][other] = lists[there][other], lists[here][at]
    return what, replace(schedule, ranks=tuple(map(tuple, lists)))


def is_right(schedule: Schedule) -> bool:
    try:
        schedule.check()
    except ScheduleError as error:
        return not error.problems  # there are
    return True
