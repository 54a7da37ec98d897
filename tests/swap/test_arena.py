"""The pinned arena: exact sizes, a hard budget, little unused, and blocks that know who used their memory."""

from __future__ import annotations

import contextlib
import gc
import queue
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel.core.swap.arena import PinnedArena, PinnedBlock
from hyper_parallel.core.swap.pool import ALIGNMENT, Growth

KIB, MIB, GIB = 1024, 1024**2, 1024**3
SMALL = Growth(min_bytes=4 * KIB, max_bytes=64 * KIB, share=1 / 32)


class FakeEvent:
    def __init__(self, is_done: bool = False) -> None:
        self.is_done = is_done
        self.num_joins = 0
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self.is_done

    def join(self) -> None:
        self.num_joins += 1
        self.is_done = True


def small_arena(budget_bytes: int = MIB, new_slab: Callable[[int], Any] = bytearray, **options: Any) -> PinnedArena:
    options = {"max_parts": 1, "growth": SMALL, **options}
    return PinnedArena(new_slab, options.pop("free_slab", lambda slab: None), budget_bytes, **options)


def taken(arena: PinnedArena, num_bytes: int) -> PinnedBlock:
    block = arena.take(num_bytes)
    assert block is not None
    return block


def within(seconds: float, call: Callable[[], object]) -> None:
    """Run in a thread, so that a lock that is never released fails the test instead of hanging it."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if failures:
        raise failures[0]


# -- how much is reserved -------------------------------------------------------------------------------------------------


def llama(tokens: int, dim: int = 4096, ffn: int = 14336, kv: int = 1024) -> list[int]:
    """What one block saves: norm, q, k, v, attention, its statistics, output, norm, gate, up, product, down; in bfloat16."""
    return [2 * tokens * n for n in (dim, dim, kv, kv, dim, 64, dim, dim, ffn, ffn, ffn, dim)]


def assorted(seed: int, low: int, high: int, num_sizes: int = 12) -> list[int]:
    rng = random.Random(seed)
    return [int(2 ** rng.uniform(low, high)) for _ in range(num_sizes)]


def unbounded_arena(max_parts: int) -> PinnedArena:
    return PinnedArena(lambda num_bytes: num_bytes, lambda slab: None, 1 << 60, max_parts=max_parts)


def ratio(arena: PinnedArena) -> float:
    stats = arena.stats()
    assert stats.peak_used_bytes > GIB, "the bound is for totals of 1 GiB and more"
    return stats.reserved_bytes / stats.peak_used_bytes


REPEATED = {
    "llama, 1024 tokens": [llama(1024)] * 16,
    "llama, 4096 tokens": [llama(4096)] * 16,
    "llama, 16384 tokens": [llama(16384)] * 16,
    "llama, gate and attention only": [[2 * 16384 * 14336, 2 * 16384 * 4096]] * 16,
    "larger llama": [llama(8192, 8192, 28672)] * 40,
    **{f"assorted {seed}": [assorted(seed, 20, 29)] * 16 for seed in range(6)},
    **{f"all different {seed}": [assorted(seed * 100 + n, 20, 29) for n in range(16)] for seed in range(4)},
    "small ones": [assorted(7, 17, 22, 100)] * 16,
}


@pytest.mark.parametrize("max_parts", [1, 16])
@pytest.mark.parametrize("name", REPEATED)
def test_repeated_steps_reserve_at_most_1_05_of_the_peak_and_grow_in_the_first_only(name: str, max_parts: int) -> None:
    arena = unbounded_arena(max_parts)
    places = []
    for _step in range(3):
        blocks = [taken(arena, size) for layer in REPEATED[name] for size in layer]
        places.append([block.parts for block in blocks])
        num_growths = arena.stats().num_growths
        for block in reversed(blocks):
            arena.give(block)
    print(f"{name}, {max_parts} parts: {ratio(arena):.4f} of {arena.stats().peak_used_bytes / GIB:.1f} GiB")
    assert ratio(arena) <= 1.05
    assert places[1] == places[2], "the same sizes take the same memory"
    assert arena.stats().num_growths == num_growths


@pytest.mark.parametrize("max_parts", [1, 16])
@pytest.mark.parametrize("seed", range(3))
def test_two_hundred_steps_in_random_order_need_no_more_than_the_first(seed: int, max_parts: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    sizes = [size for _ in range(16) for size in assorted(seed, 20, 28, 8)]
    arena = unbounded_arena(max_parts)
    for step in range(200):
        rng.shuffle(sizes)
        blocks = [taken(arena, size) for size in sizes]
        if step == 0:
            num_growths = arena.stats().num_growths
        rng.shuffle(blocks)
        for block in blocks:
            arena.give(block)
    assert arena.stats().num_growths == num_growths
    assert ratio(arena) <= 1.05


CHANGING: dict[str, Callable[[random.Random, int], list[int]]] = {
    "any length": lambda rng, step: llama(rng.randint(2048, 16384)) * 16,
    "lengths in buckets": lambda rng, step: llama(rng.choice([4096, 8192, 12288, 16384])) * 16,
    "two models in turn": lambda rng, step: llama(8192) * 16 if step % 2 else llama(4096, 5120, 13824, 5120) * 20,
    "any size": lambda rng, step: [rng.randint(MIB, 300 * MIB) for _ in range(128)],
}


@pytest.mark.parametrize("name", CHANGING)
def test_sizes_that_change_from_step_to_step_stay_within_the_bound_when_blocks_may_have_parts(name: str) -> None:
    rng = random.Random(0)
    arena = unbounded_arena(max_parts=16)
    num_blocks = num_parts = 0
    for step in range(100):
        blocks = [taken(arena, size) for size in CHANGING[name](rng, step)]
        num_blocks += len(blocks)
        num_parts += sum(len(block.parts) for block in blocks)
        for block in reversed(blocks):
            arena.give(block)
    print(f"{name}: {ratio(arena):.4f}, {num_parts / num_blocks:.2f} parts per block")
    assert ratio(arena) <= 1.05
    assert num_parts / num_blocks < 4, "copies are cut into crumbs"


@pytest.mark.parametrize("max_parts", [1, 16])
def test_a_pipeline_schedule_stays_within_the_bound(max_parts: int) -> None:
    arena = unbounded_arena(max_parts)
    for _step in range(20):
        live: list[list[PinnedBlock]] = []
        for tick in range(12):
            if tick < 8:
                live.append([taken(arena, size) for _ in range(4) for size in llama(4096)])
            if tick >= 4:
                for block in live.pop(0):
                    arena.give(block)
    assert ratio(arena) <= 1.05


@pytest.mark.parametrize(
    ("block_bytes", "reserved_bytes", "room_bytes", "slab_bytes"),
    [
        (MIB, 0, GIB, 32 * MIB),  # the smallest step
        (100 * MIB, 0, GIB, 100 * MIB),  # a block larger than the step: exactly
        (10 * MIB, 0, GIB, 30 * MIB),  # whole blocks only
        (MIB, 8 * GIB, 64 * GIB, 256 * MIB),  # 1/32
        (MIB, 100 * GIB, 200 * GIB, GIB),  # the largest step
        (MIB, 0, 5 * MIB, 5 * MIB),  # not past the budget
        (512, 0, 600, 600),
        (3 * 512, 0, GIB, 32 * MIB),  # rounded up to pages: 21845 blocks and the rest of a page
    ],
)
def test_the_size_of_a_slab(block_bytes: int, reserved_bytes: int, room_bytes: int, slab_bytes: int) -> None:
    growth = Growth(min_bytes=32 * MIB, max_bytes=GIB, share=1 / 32)
    assert growth.slab_bytes(block_bytes, reserved_bytes, room_bytes) == slab_bytes


# -- budget and failures --------------------------------------------------------------------------------------------------


def test_blocks_have_the_exact_size_and_begin_at_multiples_of_512() -> None:
    arena = small_arena()
    blocks = [taken(arena, num_bytes) for num_bytes in (1, 511, 512, 513, 5000)]
    assert [block.num_bytes for block in blocks] == [1, 511, 512, 513, 5000]
    assert all(block.offset % ALIGNMENT == 0 for block in blocks)
    assert all(block.offset + block.num_bytes <= len(block.slab) for block in blocks)
    assert arena.used_bytes == 1 + 511 + 512 + 513 + 5000
    for block in blocks:
        arena.give(block)
    assert arena.used_bytes == 0
    assert arena.stats().peak_used_bytes == 6537


def test_past_the_budget_there_is_no_block_and_it_is_counted() -> None:
    arena = small_arena(budget_bytes=10 * KIB)
    blocks = [taken(arena, 4 * KIB), taken(arena, 4 * KIB)]
    assert arena.take(4 * KIB) is None
    assert arena.take(20 * KIB) is None
    assert arena.stats().num_over_budget == 2
    assert taken(arena, 2 * KIB).num_bytes == 2 * KIB
    assert arena.reserved_bytes == 10 * KIB
    arena.give(blocks[0])
    assert taken(arena, 4 * KIB).offset == blocks[0].offset


@pytest.mark.parametrize("seed", range(5))
def test_the_budget_is_never_passed_whatever_is_asked_for(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    reserved: list[int] = []
    budget_bytes = rng.randint(20 * KIB, 300 * KIB)

    def new_slab(num_bytes: int) -> int:
        reserved.append(num_bytes)
        return num_bytes

    arena = small_arena(budget_bytes, new_slab)
    blocks: list[PinnedBlock] = []
    for _ in range(2000):
        if rng.random() < 0.6:
            block = arena.take(rng.randint(1, 9000))
            if block is not None:
                blocks.append(block)
        elif blocks:
            arena.give(blocks.pop(rng.randrange(len(blocks))))
        assert sum(reserved) == arena.reserved_bytes <= budget_bytes
    assert arena.stats().num_over_budget > 0


def test_a_lower_budget_holds_for_new_blocks_although_slabs_stay() -> None:
    arena = small_arena()
    for block in [taken(arena, 64 * KIB) for _ in range(4)]:
        arena.give(block)
    reserved_bytes = arena.reserved_bytes
    arena.budget_bytes = 100 * KIB
    held = taken(arena, 64 * KIB)
    assert arena.take(64 * KIB) is None
    assert arena.reserved_bytes == reserved_bytes
    arena.give(held)


@pytest.mark.parametrize("failure", [MemoryError("no more"), OSError(12, "Cannot allocate memory")])
def test_when_no_memory_can_be_pinned_the_arena_stops_growing_and_goes_on(failure: Exception) -> None:
    asked: list[int] = []

    def new_slab(num_bytes: int) -> bytearray:
        asked.append(num_bytes)
        if len(asked) > 1:
            raise failure
        return bytearray(num_bytes)

    arena = small_arena(new_slab=new_slab)
    block = taken(arena, 4 * KIB)
    assert arena.take(1 * KIB) is None
    assert asked == [4 * KIB, 4 * KIB, KIB]  # a step, then the block alone
    assert arena.take(1 * KIB) is None
    assert len(asked) == 3, "it was asked again"
    stats = arena.stats()
    assert stats.num_no_memory == 2
    assert stats.failure is not None
    assert str(failure) in stats.failure
    arena.give(block)
    assert taken(arena, 4 * KIB).slab is block.slab


def test_where_a_whole_step_cannot_be_pinned_the_block_alone_is() -> None:
    def new_slab(num_bytes: int) -> bytearray:
        if num_bytes > 2 * KIB:
            raise MemoryError
        return bytearray(num_bytes)

    arena = small_arena(new_slab=new_slab)
    assert taken(arena, 1000).num_bytes == 1000
    assert arena.reserved_bytes == 1024


def test_an_error_that_is_not_about_memory_is_not_swallowed() -> None:
    def new_slab(num_bytes: int) -> bytearray:
        raise RuntimeError("the device is lost")

    arena = small_arena(new_slab=new_slab)
    for _ in range(2):  # the lock was released
        with pytest.raises(RuntimeError, match="lost"):
            within(10, lambda: arena.take(100))


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_a_block_has_at_least_one_byte(num_bytes: int) -> None:
    with pytest.raises(ArgumentError, match="at least one byte"):
        small_arena().take(num_bytes)


@pytest.mark.parametrize("budget", [0, -5, True, "8GiB"])
def test_a_budget_is_a_number_above_zero(budget: Any) -> None:
    with pytest.raises((ArgumentError, TypeError)):
        small_arena(budget)
    arena = small_arena()
    with pytest.raises((ArgumentError, TypeError)):
        arena.budget_bytes = budget
    assert arena.budget_bytes == MIB


# -- giving back ----------------------------------------------------------------------------------------------------------


def test_a_block_cannot_be_given_back_twice() -> None:
    arena = small_arena()
    block = taken(arena, 100)
    arena.give(block)
    with pytest.raises(StateError, match="twice"):
        arena.give(block)
    held = taken(arena, 100)
    with pytest.raises(StateError, match="twice"):  # not even when somebody else has the memory by now
        arena.give(block)
    assert arena.used_bytes == held.num_bytes == 100


def test_a_block_that_is_gone_is_free_and_the_copies_that_used_it_are_known() -> None:
    """Ctrl-C may come before `give`, or in the finaliser that calls it."""
    arena = small_arena()
    block = taken(arena, 100)
    event = FakeEvent()
    block.last_uses = (event,)
    del block
    assert arena.used_bytes == 0
    assert taken(arena, 100).last_uses == (event,)


def test_a_block_of_another_arena_is_refused() -> None:
    arena, other = small_arena(), small_arena()
    with pytest.raises(ArgumentError, match="not from this arena"):
        arena.give(taken(other, 100))


def test_a_block_can_be_given_back_in_the_middle_of_a_call_of_the_same_thread() -> None:
    arena: PinnedArena

    def new_slab(num_bytes: int) -> bytearray:
        if waiting:
            arena.give(waiting.pop())  # as a finaliser would, with the lock of the arena held
        return bytearray(num_bytes)

    waiting: list[PinnedBlock] = []
    arena = small_arena(new_slab=new_slab)
    waiting.append(taken(arena, 4 * KIB))
    held: list[PinnedBlock] = []
    within(10, lambda: held.append(taken(arena, 8 * KIB)))
    assert not waiting
    assert arena.used_bytes == held[0].num_bytes == 8 * KIB


def test_finalisers_that_run_anywhere_inside_the_arena_give_blocks_back_safely() -> None:
    arena = small_arena()

    class Owner:
        def __init__(self) -> None:
            self.block = taken(arena, 700)
            self.itself = self  # only the garbage collector ends this, at whatever bytecode it runs

        def __del__(self) -> None:
            arena.give(self.block)

    def run() -> None:
        for _ in range(3000):
            Owner()
            arena.give(taken(arena, 300))

    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        within(60, run)
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert arena.used_bytes == 0
    assert arena.stats().num_over_budget == 0, "what was given back was not found"


@pytest.mark.parametrize("max_parts", [1, 4])
def test_eight_threads_take_and_give_each_others_blocks_and_none_is_shared(max_parts: int) -> None:
    arena = small_arena(budget_bytes=8 * MIB, max_parts=max_parts)
    passed_on: queue.Queue[tuple[PinnedBlock, bytes]] = queue.Queue()
    wrong: list[str] = []

    def fill(block: PinnedBlock, pattern: bytes) -> None:
        for slab, offset, num_bytes in block.parts:
            memoryview(slab)[offset : offset + num_bytes] = pattern * num_bytes

    def check_and_give(block: PinnedBlock, pattern: bytes) -> None:
        for slab, offset, num_bytes in block.parts:
            if bytes(memoryview(slab)[offset : offset + num_bytes]) != pattern * num_bytes:
                wrong.append(f"{block} was written by another thread")
        arena.give(block)

    def work(number: int) -> None:
        rng = random.Random(number)
        for step in range(300):
            block = arena.take(rng.choice([700, 5000, 5000, 60_000, rng.randint(1, 90_000)]))
            if block is not None:
                pattern = bytes([(number * 31 + step) % 256])
                fill(block, pattern)
                passed_on.put((block, pattern))
            if block is None or rng.random() < 0.9:
                with contextlib.suppress(queue.Empty):
                    check_and_give(*passed_on.get_nowait())

    run_threads([lambda number=number: work(number) for number in range(8)])
    while not passed_on.empty():
        check_and_give(*passed_on.get())
    assert wrong == []
    assert arena.used_bytes == 0
    assert arena.trim() > 0, "a hole is left"
    assert arena.reserved_bytes == 0


def run_threads(calls: Iterable[Callable[[], object]]) -> None:
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    if failures:
        raise failures[0]


# -- events ---------------------------------------------------------------------------------------------------------------


def test_a_block_knows_the_copies_under_way_of_all_that_was_in_its_memory() -> None:
    arena = small_arena(budget_bytes=4 * KIB)
    done, first, second = FakeEvent(is_done=True), FakeEvent(), FakeEvent()
    blocks = [taken(arena, KIB) for _ in range(4)]
    blocks[0].last_uses = (first, done)
    blocks[1].last_uses = (second, first)
    for block in blocks[:2]:
        arena.give(block)
    both = taken(arena, 2 * KIB)
    assert both.last_uses == (first, second)


def test_the_rest_of_a_cut_range_knows_them_as_well() -> None:
    arena = small_arena(budget_bytes=4 * KIB)
    event = FakeEvent()
    block = taken(arena, 4 * KIB)
    block.last_use = event
    arena.give(block)
    assert [taken(arena, size).last_uses for size in (KIB, 3 * KIB)] == [(event,), (event,)]


def test_copies_that_are_done_are_forgotten_when_the_memory_is_taken() -> None:
    arena = small_arena()
    event = FakeEvent()
    block = taken(arena, KIB)
    assert block.last_uses == ()
    assert block.last_use is None
    block.last_use = event
    assert block.last_uses == (event,)
    arena.give(block)
    event.is_done = True
    assert taken(arena, KIB).last_uses == ()


def test_setting_the_last_use_replaces_them_all() -> None:
    block = taken(small_arena(), KIB)
    block.last_uses = (FakeEvent(), FakeEvent())
    event = FakeEvent()
    block.last_use = event
    assert block.last_uses == (event,)
    block.last_use = None
    assert block.last_uses == ()


def test_a_block_of_several_parts_covers_them_in_order_and_has_no_single_place() -> None:
    arena = small_arena(budget_bytes=4 * MIB, max_parts=4, growth=Growth(2 * MIB, 2 * MIB, 1))
    blocks = [taken(arena, MIB) for _ in range(4)]
    events = [FakeEvent(), FakeEvent()]
    for block, event in zip((blocks[0], blocks[2]), events, strict=True):
        block.last_use = event
        arena.give(block)
    block = taken(arena, 2 * MIB - 100)
    assert [part.num_bytes for part in block.parts] == [MIB, MIB - 100]
    assert {id(part.slab) for part in block.parts} == {id(blocks[0].slab), id(blocks[2].slab)}
    assert set(block.last_uses) == set(events)
    assert block.num_bytes == 2 * MIB - 100
    with pytest.raises(StateError, match="Expected one part, got 2"):
        _ = block.offset
    with pytest.raises(StateError, match="max_parts=1"):
        _ = block.slab
    arena.give(block)
    assert taken(arena, 2 * MIB - 100).parts == block.parts


# -- trim -----------------------------------------------------------------------------------------------------------------


def test_trim_joins_the_last_copies_and_frees_slabs_without_blocks() -> None:
    freed: list[bytearray] = []
    arena = small_arena(free_slab=freed.append)
    kept, gone = taken(arena, 8 * KIB), taken(arena, 16 * KIB)
    event = FakeEvent()
    gone.last_use = event
    arena.give(gone)
    assert arena.trim() == 16 * KIB
    assert event.num_joins == 1
    assert [len(slab) for slab in freed] == [16 * KIB]
    assert arena.reserved_bytes == 8 * KIB
    assert arena.trim() == 0
    arena.give(kept)
    assert arena.trim() == 8 * KIB
    assert arena.reserved_bytes == 0
    assert taken(arena, KIB)


def test_a_slab_whose_last_copy_cannot_be_joined_is_not_freed() -> None:
    freed: list[bytearray] = []
    arena = small_arena(free_slab=freed.append)
    block = taken(arena, 8 * KIB)

    class Broken(FakeEvent):
        def join(self) -> None:
            raise RuntimeError("the device is lost")

    broken = Broken()
    block.last_use = broken
    arena.give(block)
    with pytest.raises(RuntimeError, match="lost"):
        arena.trim()
    assert freed == []
    assert arena.reserved_bytes == 8 * KIB
    assert taken(arena, 8 * KIB).last_uses == (broken,)


def test_a_copy_that_failed_does_not_keep_its_slab() -> None:
    arena = small_arena()
    block = taken(arena, 8 * KIB)

    class Failed(FakeEvent):
        def join(self) -> None:
            raise RuntimeError("disk full")

    block.last_use = failed = Failed()
    failed.error = RuntimeError("disk full")
    arena.give(block)
    assert arena.trim() == 8 * KIB


def test_nobody_takes_a_slab_that_trim_is_about_to_free() -> None:
    freed: list[bytearray] = []
    arena = small_arena(free_slab=freed.append)
    block = taken(arena, 8 * KIB)
    meanwhile: list[PinnedBlock] = []

    class Busy(FakeEvent):
        def join(self) -> None:
            meanwhile.append(taken(arena, 8 * KIB))  # another thread, while this one waits

    block.last_use = Busy()
    arena.give(block)
    within(10, arena.trim)
    assert freed[0] is not meanwhile[0].slab


def test_after_a_failure_trim_lets_the_arena_grow_again() -> None:
    is_full = True

    def new_slab(num_bytes: int) -> bytearray:
        if is_full:
            raise MemoryError
        return bytearray(num_bytes)

    arena = small_arena(new_slab=new_slab)
    assert arena.take(KIB) is None
    is_full = False
    assert arena.take(KIB) is None
    arena.trim()
    assert taken(arena, KIB)
