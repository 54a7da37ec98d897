"""Bugs that the campaigns must find: each takes one line of the engine away, or bends it.

`find_planted` runs the campaign with the changed engine until something is found. A bug that is not found means that the campaign is
blind there, or that the line does nothing and should go.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import hyper_parallel.core.swap
from support.swap_programs import InPlaceProgram, Program

FOLDER = Path(hyper_parallel.core.swap.__file__).parent


class Bug(NamedTuple):
    name: str
    file: str
    line: str  # what stands there
    instead: str
    campaign: str = "programs"


_BLOCK_EVENTS = """            for event in block.last_uses:
                offload.wait_event(event)  # O3, O9
"""

BUGS = [
    Bug("O1: the offload does not wait for the producer", "engine.py",
        "            offload.wait_event(stream.record_event())  # O1\n", ""),
    Bug("O2: the source is dropped without a wait", "engine.py", "        _wait(oldest.stream, oldest.event)\n", ""),
    Bug("O2: the wait is on the caller's stream instead of the memory's", "engine.py",
        "_wait(oldest.stream, oldest.event)", "_wait(self.device.current_stream(), oldest.event)"),
    Bug("O2: a source is dropped before its copy is done", "window.py",
        "while self._entries and self._entries[0].event.query():", "while self._entries:"),
    Bug("O3, O9: the offload ignores the block's last copies", "engine.py", _BLOCK_EVENTS, ""),
    Bug("O3: the block forgets the load that read it", "engine.py",
        "        block.last_uses = (slot.loaded,)  # O3; the load came after the offload (O4)\n", ""),
    Bug("O5: the load does not wait for earlier users of the memory", "engine.py",
        "        load.wait_event(stream.record_event())  # O5: after the allocation, so after all earlier users of that memory\n", ""),
    Bug("O5: the event is recorded on the caller's stream", "engine.py",
        "load.wait_event(stream.record_event())  # O5", "load.wait_event(self.device.current_stream().record_event())  # O5"),
    Bug("O6: compute does not wait for the load", "engine.py", "error = _wait(stream, loaded)  # O6", "error = None"),
    Bug("O7: nobody holds the buffer of a load under way", "engine.py",
        "self._loading.add(InFlight(None, stream, buffer, slot.loaded, slot.num_bytes))  # O7", "pass"),
    Bug("O8: a buffer is used on another stream than its own", "engine.py",
        "if slot.buffer is not None and slot.stream != stream:", "if False:"),
    Bug("a block is never given back", "slot.py", "            tier.give(block)\n", "            pass\n"),
    Bug("a group holds its slots", "slot.py", "self.slots.append(weakref.ref(slot))", "self.slots.append(lambda: slot)"),
    Bug("a buffer is held after every handle asked", "engine.py",
        "if not slot.waiting and slot.buffer is buffer:", "if False:"),
    Bug("the window counts wrong", "window.py",
        "        entry = self._entries.popleft()\n        self.held_bytes -= entry.num_bytes\n",
        "        entry = self._entries.popleft()\n"),
    Bug("the window has no end", "engine.py", "                if oldest is None or self._fits(slot):\n", "                if True:\n"),
    Bug("an order that was told is forgotten", "slot.py", "        stack = [*rest, *reversed(listed)]\n",
        "        stack = [slot for ref in self.slots if (slot := ref()) is not None]\n"),
    Bug("an order that was told is taken from its end", "slot.py", "[*rest, *reversed(listed)]", "[*rest, *listed]"),
    Bug("what the order does not list comes first", "slot.py", "[*rest, *reversed(listed)]", "[*reversed(listed), *rest]"),
    Bug("prefetch goes on where the slot was saved, not where it is expected", "prefetch.py",
        "        group.cursor = position - 1\n", "        group.cursor = slot.index - 1\n"),
    Bug("what was asked for already is loaded again after a change of order", "prefetch.py",
        "if slot is not None and slot.waiting and slot.state in", "if slot is not None and slot.state in"),
    Bug("a block is lost when the launch raises", "engine.py",
        "        except BaseException:\n            tier.give(block)\n            raise\n", "        except BaseException:\n            raise\n",
        "failures"),
    Bug("a block is given back while an unfollowed copy writes it", "engine.py",
        "            if self._settle(offload, slot.label, (slot.source, block)):\n                tier.give(block)\n",
        "            tier.give(block)\n", "failures"),
    Bug("a version is not compared when the source is dropped", "slot.py",
        "        self.look_for_change()\n        self.source = None\n", "        self.source = None\n", "in place"),
    Bug("a version is not compared when a handle asks", "engine.py",
        "            slot.look_for_change()\n            if slot.changed", "            if slot.changed", "in place"),
    Bug("a change is found and not said", "engine.py", "            if slot.changed is not None:\n", "            if False:\n", "in place"),
]  # fmt: skip


# Lines that the programs here cannot miss, with the reason why they stay.
REDUNDANT = [
    Bug("O9: the block forgets the offload that wrote it", "engine.py",
        "        block.last_uses = (slot.offloaded,)  # O9\n", ""),  # the engine's one offload stream writes in order; with a user's streams it is found by test_hand_made_groups.py
    Bug("O4: the load does not wait for the offload", "engine.py", "        load.wait_event(slot.offloaded)  # O4\n", ""),  # a load starts from HOST only: the copy was seen done, or the stream that O5 waits for had waited for it
]  # fmt: skip


class InjectedError(Exception):
    pass


def unchanged(campaign: str) -> Bug:
    """No bug at all: what a campaign finds then is its own mistake."""
    return Bug(f"none, in {campaign!r}", "engine.py", "# O6\n", "# O6 \n", campaign)


def changed_engine(bug: Bug) -> types.ModuleType:
    """The engine's modules with the bug in one of them, beside the real ones."""
    loaded: dict[str, types.ModuleType] = {}
    for file in ("slot.py", "window.py", "turn.py", "prefetch.py", "engine.py"):
        source = (FOLDER / file).read_text()
        if file == bug.file:
            if source.count(bug.line) != 1:
                raise LookupError(
                    f"{bug.name}: its line stands {source.count(bug.line)} times in {file}; bring the list up to date"
                )
            source = source.replace(bug.line, bug.instead)
        name = f"planted_{file.removesuffix('.py')}"
        module = types.ModuleType(name)
        sys.modules[name] = module  # dataclasses and annotations look their module up
        for other, there in loaded.items():
            source = source.replace(f"from hyper_parallel.core.swap.{other} import", f"from {there.__name__} import")
        exec(compile(source, str(FOLDER / file), "exec"), module.__dict__)  # noqa: S102 - our own source
        loaded[file.removesuffix(".py")] = module
    return loaded["engine"]


def find_planted(bug: Bug, num_seeds: int = 1500) -> str | None:
    """What the campaign said of the bug, with the seed; None if it ran through."""
    modules = changed_engine(bug)
    for seed in range(num_seeds):
        try:
            _run(bug.campaign, seed, modules)
        except Exception as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return None


def _run(campaign: str, seed: int, modules: Any) -> None:
    if campaign == "in place":
        InPlaceProgram(seed, modules=modules).run()
    elif campaign == "programs":
        Program(seed, modules=modules).run()
    else:
        program = Program(seed, modules=modules, num_actions=5)
        program.device.fail_call(1 + seed % 60, InjectedError)
        try:
            program.run()
            return
        except InjectedError:
            pass  # the rest stands outside: in here the error's frames still hold what they were about to save
        program.forwards.clear()
        program.held.clear()
        program.device._failures.clear()
        program.forward()
        program.backward(program.forwards[-1], retain=False)
        program.finish()
