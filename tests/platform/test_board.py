"""What ranks write about their calls, read while it is being written."""

from __future__ import annotations

import mmap
import sys
import threading

from hyper_parallel.platform.communication.board import _NUM_SLOTS, _SLOT_BYTES, Board


def test_a_call_of_another_name_is_found_and_what_is_being_written_is_no_other_call() -> None:
    with mmap.mmap(-1, 2 * _NUM_SLOTS * _SLOT_BYTES) as memory:
        mine, theirs = Board(memory, 0), Board(memory, 1)
        mine.write("world", 7, "all_reduce")
        theirs.write("world", 7, "barrier")
        assert mine.find_other("world", 7, "all_reduce", (0, 1)) == (1, "barrier")
        stop = threading.Event()

        def write_on() -> None:
            while not stop.is_set():
                for number in (7, 7 + _NUM_SLOTS):  # both have the same slot
                    theirs.write("world", number, "all_reduce")

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)  # the threads take turns in the middle of everything
        writer = threading.Thread(target=write_on)
        writer.start()
        try:
            found = [mine.find_other("world", 7 + _NUM_SLOTS, "all_reduce", (1,)) for _ in range(100_000)]
        finally:
            stop.set()
            writer.join()
            sys.setswitchinterval(interval)
        assert not any(found)
