"""Identity and groups.

A group is cached by its ranks: `create_group` of the same ranks gives the same object until it is destroyed. Members
agree on a new group without anyone else: every process counts how often it has created a group of the same ranks, and
that count makes the name.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from hyper_parallel._base import log
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform.arguments import cache_key, check_ranks
from hyper_parallel.platform.communication.answers import ranks_in_words
from hyper_parallel.platform.communication.transport import Transport
from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS, Platform
from hyper_parallel.platform.opaque import Group

_num_created: dict[tuple[int, ...], int] = {}  # per process, all worlds: a name is never used twice


class Groups(Platform):
    transport: ClassVar[Transport]

    @classmethod
    def get_rank(cls) -> int:
        return cls.transport.rank()

    @classmethod
    def get_world_size(cls) -> int:
        return len(cls.transport.ranks_of(cls.transport.world())) if cls.transport.is_up() else 1

    @classmethod
    def get_global_rank(cls, group: Group, group_rank: int) -> int:
        ranks = cls.get_process_group_ranks(group)
        place = as_int(group_rank)
        if place is None or not 0 <= place < len(ranks):
            raise ArgumentError(
                "There is no such member of the group.",
                expected=f"from 0 to {len(ranks) - 1}",
                got=describe(group_rank),
            )
        return ranks[place]

    @classmethod
    def get_group_local_rank(cls, group: Group = None) -> int:
        return cls.get_process_group_ranks(group).index(cls.transport.rank())

    @classmethod
    def get_process_group_ranks(cls, group: Group = None) -> list[int]:
        if group is None and not cls.transport.is_up():
            return [0]
        return list(cls.transport.ranks_of(cls.transport.group(group, "get_process_group_ranks")))

    @classmethod
    def get_backend(cls, group: Group = None) -> str:
        return cls.transport.backend_of(cls.transport.group(group, "get_backend"))

    @classmethod
    def init_process_group(
        cls,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: object = None,
        pg_options: object = None,
        device_id: object = None,
    ) -> None:
        """Start communication; repeating it does nothing. The default backend fits the device."""
        if cls.transport.is_up():
            _check_same("world_size", world_size, cls.get_world_size())
            _check_same("rank", rank, cls.get_rank())
            return
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ArgumentTypeError("`timeout` is a length of time.", expected="a timedelta", got=describe(timeout))
        cls.transport.start(
            backend, init_method=init_method, timeout=timeout, world_size=world_size, rank=rank, store=store,
            pg_options=pg_options, device_id=device_id,
        )  # fmt: skip
        log.current_rank = cls.get_rank

    @classmethod
    def destroy_process_group(cls, group: Group = None) -> None:
        transport = cls.transport
        if group is None:
            EXISTING_COMM_GROUPS.clear()
            log.current_rank = log.rank_of_environment
            if transport.is_up():
                transport.roll_call.stop()
                transport.end(None)
            return
        own = transport.group(group, "destroy_process_group")
        name = transport.name_of(own)
        for key, cached in list(EXISTING_COMM_GROUPS.items()):
            if cached is own or cached == own:
                del EXISTING_COMM_GROUPS[key]
        if name == transport.name_of(transport.world()):
            cls.destroy_process_group(None)
        else:
            transport.end(own)
            transport.roll_call.forget(name)

    @classmethod
    def split_group(
        cls,
        parent_pg: object = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: object = None,
        group_desc: str | None = None,
    ) -> Any:
        """Split a group into disjoint ones, given as lists of world ranks.

        Returns this rank's new group, or None if it is in no list.
        """
        if split_ranks is None or not hasattr(split_ranks, "__iter__") or len(list(split_ranks)) == 0:
            raise ArgumentError(
                "`split_group` needs the lists of ranks.",
                expected="for example [[0, 1], [2, 3]]",
                got=describe(split_ranks),
            )
        parent = cls.get_process_group_ranks(cls.transport.group(parent_pg, "split_group"))
        seen: set[int] = set()
        mine: tuple[int, ...] | None = None
        for listed in split_ranks:
            ranks = check_ranks(listed, parent, "split_group")
            if seen & set(ranks):
                raise ArgumentError(
                    "The lists of `split_group` are disjoint.",
                    expected="every rank in one list at most",
                    got=f"{ranks_in_words(sorted(seen & set(ranks)))} in two",
                )
            seen |= set(ranks)
            if cls.transport.rank() in ranks:
                mine = ranks
        return None if mine is None else _new_group(cls.transport, mine, timeout, pg_options, group_desc)

    def _create_group(self, rank_list: Sequence[int]) -> Any:
        """Make a new group of these ranks, beside those that exist."""
        self.transport.group(None, "create_group")  # raises where communication is not up
        ranks = check_ranks(rank_list, range(self.get_world_size()), "create_group")
        return _new_group(self.transport, ranks) if self.transport.rank() in ranks else None

    @classmethod
    def mark_created_groups(cls, process_group: object) -> None:
        groups = process_group if isinstance(process_group, (list, tuple)) else [process_group]
        super().mark_created_groups([cls.transport.group(group, "mark_created_groups") for group in groups])


def _new_group(
    transport: Transport,
    ranks: tuple[int, ...],
    timeout: object = None,
    options: object = None,
    description: str | None = None,
) -> Any:
    number = _num_created[ranks] = _num_created.get(ranks, 0) + 1
    roll_call = transport.roll_call
    # In a log of its own: the members meet here, whatever else each of them does.
    meeting = roll_call.log(f"new group {cache_key(ranks)} {number}", ranks)
    entry = roll_call.enter(meeting, "create_group")
    try:
        group = transport.new_group(ranks, number, timeout, options, description)
    except RuntimeError as error:
        raise roll_call.explain(entry, error) from error
    roll_call.forget(meeting.name)
    return group


def _check_same(name: str, asked: int, there: int) -> None:
    if asked is not None and as_int(asked) not in (-1, there):
        raise StateError(
            "Communication was started before, with other numbers.",
            expected=f"{name} {there}, as it is",
            got=f"{name} {describe(asked)}",
            do="Call `destroy_process_group()` first, or leave the argument out.",
        )
