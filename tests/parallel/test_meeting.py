"""The rules by which two sides meet, in every order in which they can come: no threads, no clock."""

from __future__ import annotations

import copy

import pytest

from hyper_parallel.core.parallel.pipeline.meeting import Meeting, Side
from hyper_parallel.platform.communication.sync_hook import COMM, COMPUTE, ROLES

FORWARD, BACKWARD = 0, 1


def hooks(num_layers: int, is_backward: bool) -> list[tuple[str, str]]:
    """What a chunk of these layers leaves and enters, in order."""
    found = [ROLES[name] for _ in range(num_layers) for name in "ABCD"]
    return [(entered, left) for left, entered in reversed(found)] if is_backward else found


class Walk:
    """Two scripts, each at some hook; the meeting; what was enqueued so far, in order."""

    def __init__(self, num_forward: int, num_backward: int) -> None:
        self.meeting = Meeting(("forward", "backward"), goes_first=BACKWARD)
        self.scripts = [hooks(num_forward, False), hooks(num_backward, True)]
        self.at = [0, 0]
        self.log: list[tuple[int, str, int]] = []  # side, role, hook: begun, once nobody holds it

    def can_step(self, number: int) -> bool:
        side = self.meeting.sides[number]
        return not side.has_ended and not side.waits

    def step(self, number: int) -> None:
        """Go on to the next hook, or to the end."""
        side = self.meeting.sides[number]
        if self.at[number] == len(self.scripts[number]):
            self.meeting.end(side)
        else:
            left, entered = self.scripts[number][self.at[number]]
            self.at[number] += 1
            self.meeting.leave(side, left)
            self.meeting.ask(side, entered)
        for which, each in enumerate(self.meeting.sides):
            entry = (which, each.role or "", self.at[which])
            if each.role is not None and not each.is_held and entry not in self.log:
                self.log.append(entry)

    def key(self) -> tuple[object, ...]:
        sides = [(s.role, s.wants, s.is_held, s.is_fresh, s.has_ended) for s in self.meeting.sides]
        return (*self.at, *sides)


def walks(num_forward: int, num_backward: int) -> list[Walk]:
    """All ends of all orders in which two chunks can come to their hooks. Every state on the way is looked at."""
    todo, seen, ends = [Walk(num_forward, num_backward)], set(), []
    while todo:
        walk = todo.pop()
        check(walk)
        ready = [number for number in (FORWARD, BACKWARD) if walk.can_step(number)]
        if not ready:
            ends.append(walk)
        for number in ready:
            after = copy.deepcopy(walk)
            after.step(number)
            key = (after.key(), tuple(after.log))
            if key not in seen:
                seen.add(key)
                todo.append(after)
    return ends


def check(walk: Walk) -> None:
    forward, backward = walk.meeting.sides
    assert not (forward.role == backward.role == COMM), "two communicate"
    for side, other in ((forward, backward), (backward, forward)):
        assert side.wants is None or side.role is None
        assert not side.is_held or (side.role == COMPUTE and other.role == COMM)


def expected_log(num_forward: int, num_backward: int) -> list[tuple[int, str, int]]:
    """The table of the README: backward is one hook ahead, who communicates comes first, the longer side ends alone."""
    forward, backward = hooks(num_forward, False), hooks(num_backward, True)
    if not forward or not backward:
        alone = BACKWARD if backward else FORWARD
        return [(alone, entered, at) for at, (_, entered) in enumerate(forward or backward, 1)]
    log = [(BACKWARD, COMM, 1)]
    num_meetings = min(len(forward), len(backward) - 1)
    for at in range(num_meetings):
        two = [(FORWARD, forward[at][1], at + 1), (BACKWARD, backward[at + 1][1], at + 2)]
        log += sorted(two, key=lambda entry: entry[1] != COMM)
    log += [(FORWARD, forward[at][1], at + 1) for at in range(num_meetings, len(forward))]
    log += [(BACKWARD, backward[at][1], at + 1) for at in range(num_meetings + 1, len(backward))]
    return log


@pytest.mark.parametrize("num_forward", range(9))
def test_roles_are_entered_in_the_order_of_the_table_whoever_comes_first(num_forward: int) -> None:
    for num_backward in range(9):
        ends = walks(num_forward, num_backward)
        assert ends
        for walk in ends:
            assert all(side.has_ended for side in walk.meeting.sides), "somebody waits for ever"
            # Where one side has none, the other may come to its hooks before or after that one has ended.
            assert sorted(walk.log) == sorted(expected_log(num_forward, num_backward))
            if num_forward and num_backward:
                assert common_part(walk.log, num_forward, num_backward) == common_part(
                    expected_log(num_forward, num_backward), num_forward, num_backward
                )


def common_part(log: list[tuple[int, str, int]], num_forward: int, num_backward: int) -> list[tuple[int, str, int]]:
    num_meetings = min(4 * num_forward, 4 * num_backward - 1)
    return [entry for entry in log if entry[2] <= num_meetings + entry[0]]


def meeting_by_hand() -> tuple[Meeting, Side, Side]:
    meeting = Meeting(("first", "second"))
    return (meeting, *meeting.sides)


def test_who_computes_waits_until_the_communication_is_enqueued() -> None:
    meeting, one, two = meeting_by_hand()
    meeting.ask(two, COMPUTE)
    assert two.waits
    meeting.ask(one, COMM)
    assert not one.waits
    assert two.waits
    meeting.leave(one, COMM)
    assert not two.waits


def test_sides_that_keep_their_roles_meet_again_and_again() -> None:
    meeting, one, two = meeting_by_hand()
    for _ in range(3):
        meeting.ask(one, COMM)
        meeting.ask(two, COMPUTE)
        assert (one.waits, two.waits) == (False, True)
        meeting.leave(one, COMM)
        assert not two.waits
        meeting.leave(two, COMPUTE)


def test_two_that_want_to_communicate_take_turns() -> None:
    meeting, one, two = meeting_by_hand()
    went = []
    meeting.ask(one, COMM)
    meeting.ask(two, COMM)
    for _ in range(4):
        (side,) = [each for each in (one, two) if not each.waits]
        went.append(side.name)
        meeting.leave(side, COMM)
        meeting.ask(side, COMM)
    assert went == ["first", "second", "first", "second"]


def test_two_that_want_to_compute_go_on_at_once() -> None:
    meeting, one, two = meeting_by_hand()
    meeting.ask(one, COMPUTE)
    assert one.waits
    meeting.ask(two, COMPUTE)
    assert not one.waits
    assert not two.waits


def test_the_role_one_is_in_is_entered_without_a_meeting() -> None:
    meeting, one, two = meeting_by_hand()
    meeting.ask(one, COMM)
    meeting.ask(two, COMPUTE)
    meeting.leave(one, COMPUTE)
    meeting.ask(one, COMM)
    assert not one.waits
    assert two.waits, "what the first communicates goes on"


def test_who_has_ended_holds_nobody_up() -> None:
    meeting, one, two = meeting_by_hand()
    meeting.ask(one, COMM)
    meeting.ask(two, COMPUTE)
    meeting.end(one)
    assert not two.waits
    meeting.ask(two, COMM)
    assert not two.waits
