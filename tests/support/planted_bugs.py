"""Bugs that the campaigns must find: each takes one statement of the source away, or bends it.

Where: at the mark of that name in the source (`# plant: offload-after-producer`); `planting` says how. A bug that is not
found means that the campaign is blind there, or that the statement does nothing and should go.
"""

from __future__ import annotations

from dataclasses import dataclass

from support.planting import (
    Bug,
    argument,
    condition,
    index,
    later,
    preceded_by,
    removed,
    turned_around,
    value,
    without_items,
    without_operands,
)


@dataclass(frozen=True)
class EngineBug(Bug):
    campaign: str = "programs"


@dataclass(frozen=True)
class RegionBug(Bug):
    first_seed: int = 0  # the first of 150 programs: rare bugs need the right ones
    # Of each program: in the third, recorded ops run without their function; with 4, forwards are not watched.
    num_runs: int = 1


# The swap engine, against random programs on the simulated device: tests/swap/test_planted_bugs.py.
ENGINE = [
    EngineBug("O1: the offload does not wait for the producer", "offload-after-producer", removed),
    EngineBug("O2: the source is dropped without a wait", "source-after-offload", removed),
    EngineBug("O2: the wait is on the caller's stream instead of the memory's", "source-after-offload", argument(0, "self.device.current_stream()")),
    EngineBug("O2: a source is dropped before its copy is done", "finished-only", without_operands(1)),
    EngineBug("O3, O9: the offload ignores the block's last copies", "offload-after-block", removed),
    EngineBug("O3: the block forgets the load that read it", "block-notes-load", removed),
    EngineBug("O5: the load does not wait for earlier users of the memory", "load-after-stream", removed),
    EngineBug("O5: the event is recorded on the caller's stream", "load-after-stream", argument(0, "self.device.current_stream().record_event()")),
    EngineBug("O6: compute does not wait for the load", "use-after-load", value("None")),
    EngineBug("O7: nobody holds the buffer of a load under way", "hold-loading", removed),
    EngineBug("O8: a buffer is used on another stream than its own", "buffer-stream", condition("False")),
    EngineBug("a block is never given back", "give-block", removed),
    EngineBug("a group holds its slots", "weak-slots", argument(0, "lambda: slot")),
    EngineBug("a buffer is held after every handle asked", "last-ask", condition("False")),
    EngineBug("the window counts wrong", "window-bytes", removed),
    EngineBug("the window has no end", "window-limit", condition("True")),
    EngineBug("an order that was told is forgotten", "expected-order", value("[slot for ref in self.slots if (slot := ref()) is not None]")),
    EngineBug("an order that was told is taken from its end", "expected-order", value("[*rest, *listed]")),
    EngineBug("what the order does not list comes first", "expected-order", value("[*reversed(listed), *rest]")),
    EngineBug("prefetch goes on where the slot was saved, not where it is expected", "cursor", value("slot.index - 1")),
    EngineBug("what was asked for already is loaded again after a change of order", "waiting", without_operands(1)),
    EngineBug("a block is lost when the launch raises", "failed-launch", removed, "failures"),
    EngineBug("a block is given back while an unfollowed copy writes it", "unfollowed-offload", condition("True"), "failures"),
    EngineBug("a version is not compared when the source is dropped", "version-at-drop", removed, "in place"),
    EngineBug("a version is not compared when a handle asks", "version-at-ask", removed, "in place"),
    EngineBug("a change is found and not said", "say-change", condition("False"), "in place"),
]  # fmt: skip


# Statements that the programs there cannot miss, with the reason why they stay.
REDUNDANT = [
    # The engine's one offload stream writes in order; with a user's streams it is found by test_hand_made_groups.py.
    EngineBug("O9: the block forgets the offload that wrote it", "block-notes-offload", removed),
    # A load starts from HOST only: the copy was seen done, or the stream that O5 waits for had waited for it.
    EngineBug("O4: the load does not wait for the offload", "load-after-offload", removed),
]


# The engine again, moved by hand: tests/activation/test_hand_made_groups.py.
BY_HAND = [
    Bug("O1: the stream of the caller is not waited for", "hand-after-caller", removed),
    Bug("O2: the source is dropped without a wait", "hand-source", removed),
    Bug("the caller's stream does not wait for the offload", "hand-caller", removed),
    Bug("O3: a second load of a block does not wait for the first", "load-after-load", removed),
    Bug("O9: the block forgets the offload that wrote it", "block-notes-offload", removed),
    Bug("the window keeps a source that was waited for", "hand-window", removed),
]


# PyTorch's glue, against programs with tensors: tests/activation/test_planted_bugs.py.
GLUE = [
    Bug("a lost offset", "view-offset", value("0")),
    Bug("a lost stride", "view-stride", value("torch.empty(tensor.size(), device='meta').stride()")),
    Bug("a storage is recognised by its address alone", "known-storage", without_operands(1, 2)),
    Bug("an older version of a storage is taken for the present one", "known-storage", without_operands(2)),
    Bug("every view moves its storage", "known-storage", condition("False")),
    Bug("`weight.t()` is swapped", "parameter-view", removed),
    Bug("a weight cast by autocast is swapped", "parameter-cast", without_operands(1)),
    Bug("buffers are swapped", "own-buffers", value("[]")),
    Bug("a kept tensor leads to its own node", "kept-detached", value("tensor")),
    Bug("a kept tensor's version is not compared", "kept-version", condition("False")),
    Bug("a swapped tensor's version is read from an alias of its own", "swapped-alias", value("tensor.data")),
    Bug("a policy's answer is turned around", "policy-answer", turned_around),
    Bug("the hooks know the block they belong to", "hooks-without-block", argument(0, "lambda tensor: (self, self._recorder.pack(tensor))[1]")),
]  # fmt: skip


# The regions, against random programs: tests/activation/test_planted_region_bugs.py.
REGIONS = [
    RegionBug("a random op that runs again draws other numbers", "replay-draws", removed),
    RegionBug("a replay leaves the generators where it got to", "replay-states", without_items(2)),
    RegionBug("a replay writes into the user's memory", "replay-copies", condition("False"), 150),
    RegionBug("two views of one value are taken for the same argument", "view-argument", removed, 400),
    RegionBug("a saved value that was written over is used", "written-over", removed),
    RegionBug("every input is a leaf in replay", "leaf-input", condition("True")),
    RegionBug("a replay begins with what the region has written", "replay-begins", value("{}")),
    RegionBug("what a policy said of a view is forgotten by the residual", "policy-of-view", removed),
    RegionBug("a recorded op draws other numbers", "recorded-draws", removed, num_runs=3),
    RegionBug("recorded ops leave the generators where they got to", "recorded-states", without_items(0, 1), num_runs=3),
    RegionBug("a recorded op reads the whole value in place of a view", "recorded-view", condition("True"), num_runs=3),
    RegionBug("recorded ops run again for other scalars", "same-scalars", value("True"), num_runs=3),
    RegionBug("a second run of what was not watched draws other numbers", "unwatched-draws", removed, first_seed=300, num_runs=4),
    RegionBug("it leaves the generators where it got to", "unwatched-states", without_items(2), num_runs=4),
    RegionBug("a residual is given what another one dropped", "residual-number", argument(0, "min(found)"), num_runs=4),
    RegionBug("a view of what was kept is taken for all of it", "unwatched-view", value("tensor"), num_runs=4),
]  # fmt: skip


# One step in numbers, against a framework that runs it: tests/planner/test_timeline.py.
STEPS = [
    Bug("a residual is freed late in backward", "residual-freed", removed),
    Bug("what the record holds for the replay is freed with its residual", "record-holds", without_operands(2)),
    Bug("parts are made after the op that makes them", "parts-made", index("op")),
    Bug("parts are given back before the op that made them", "parts-freed", index("index")),
    Bug("the window is ignored", "limits", argument(2, "Limits(1 << 40, limits.prefetch_bytes, limits.on_full)")),
    Bug("the limit of prefetch is ignored", "limits",
        argument(2, "Limits(limits.window_bytes, 1 << 40, limits.on_full, first_window_bytes=limits.first_window_bytes)")),
    Bug("a residual that is recomputed is dropped before the forward ends", "recomputed-until", value("local")),
    Bug("what nothing needs is kept (rule 15)", "unneeded-until", value("self.kept")),
    Bug("what nothing needs is dropped before that is known", "unneeded-until", value("local")),
    Bug("a residual leaves only when the forward ends", "leaves", condition("False")),
    Bug("what only the replay needs leaves at once", "leaves", condition("True")),
    Bug("what a region leaves behind is gone when it ends", "left-behind", value("self.end if value.freed_after is None else value.freed_after")),
    Bug("a managed region does not hold its arguments", "arguments-until", value("self.end if value.freed_after is None else value.freed_after")),
    Bug("the engine is not told the order", "tell-order", removed),
    Bug("inputs come last in the order", "inputs-first", removed),
    Bug("the engine is not told of arrivals", "tell-arrival", removed),
    Bug("the engine is not told that a region has run again", "tell-replayed", removed),
    Bug("arrival is told before every replay", "arrives-first", condition("True")),
    Bug("a region that swaps nothing does not tell of its replay", "nothing-swapped", removed),
    Bug("the engine does not hear what a region holds", "tell-kept", removed),
    Bug("the engine does not hear that a forward is over", "tell-end", removed),
    Bug("the handle of a residual stays until the end", "drop-handle", removed),
    Bug("the replay keeps what it took", "replay-lets-go", removed),
    Bug("the replay keeps what nobody wants", "replay-freed", index("self.end")),
    Bug("temporaries of the replay are forgotten", "replay-works", preceded_by("holding.temporary_bytes[op] = 0")),
    Bug("a use through a view is not seen", "use-through-view", value("index")),
    Bug("everything is asked for when backward begins", "asked-at",
        value("self._by_moment(None if value.asked_at is None else self.end for value in self.swapped)")),
    Bug("small values are swapped", "smallest", value("1")),
    Bug("backward's own memory is forgotten", "backward-own", value("0")),
    Bug("outside memory is taken late", "outside-first", later),
    Bug("the link is as fast when both directions are busy", "both-directions", value("0.0")),
    Bug("the host is always in step", "host-lead", value("0.0")),
    Bug("the host does not wait at the end of a step", "host-waits", removed),
    Bug("the host has room for everything", "host-room", value("None")),
]  # fmt: skip

# Sharded units, against random programs and numbers of collectives: tests/parallel/test_sharding_order.py.
SHARDING = [
    Bug("a unit is gathered at each lease", "gather-once", condition("True")),
    Bug("the version is that before replaced shards were taken in", "gathered-version", value("self.memory.version() - 1")),
    Bug("a changed unit stays as it is", "let-go-changed", removed),
    Bug("nobody waits for a gather", "wait-gather", removed),
    Bug("modules keep the whole parameters", "show-shards", removed),
    Bug("whole memory stays for ever", "last-lease", removed),
    Bug("a gather under way is freed like one that has ended", "gather-under-way", condition("False")),
    Bug("a call adds nothing to borrowed parameters", "calls-of-borrowed", removed),
    Bug("no call is open", "open-calls", value("False")),
    Bug("a change between forward and backward is not seen", "unchanged", condition("False")),
    Bug("a schedule begins with what an error has left", "unshard-forgets", removed),
    Bug("a schedule keeps what has changed", "unshard-changed", removed),
    Bug("weights are not divided by", "divisor", value("None")),
    Bug("a step keeps its units whole", "end-step", removed),
    Bug("calls of a failed step are waited for", "forget-calls", removed),
    Bug("leases of a failed step stay", "forget-leases", removed),
    Bug("nobody remembers what was lost", "has-lost", removed),
    Bug("gradients of a failed step stay", "forget-gradients", removed),
    Bug("a reduction that was dropped is waited for", "forget-reduce", removed),
    Bug("a forward begins with what an error has left", "forward-forgets", removed),
    Bug("a rerun is no part of the pass", "rerun-in-pass", removed),
    Bug("a forward uses what has changed", "forward-changed", removed),
    Bug("a forward that found no room keeps its leases", "forward-has-not-begun", removed),
    Bug("nothing is gathered ahead in forward", "ahead-in-forward", removed),
    Bug("hidden outputs are not remembered", "hides-outputs", removed),
    Bug("a rerun does not keep what it made whole", "stay-for-pass", removed),
    Bug("nothing stays for the step", "stay-for-step", removed),
    Bug("the end of a forward keeps its lease", "forward-ends", removed),
    Bug("what was gathered ahead stays when it is used", "ahead-used", removed),
    Bug("a forward does not wait", "wait-whole", removed),
    Bug("modules are not given the whole parameters", "show-whole", removed),
    Bug("the last unit of a forward is followed by what came after it once", "last-of-forward", removed),
    Bug("what was gathered ahead stays when forward ends", "forward-forgets-ahead", removed),
    Bug("what did not come stays", "ahead-did-not-come", removed),
    Bug("interrupted forwards are not seen", "interrupted-forwards", condition("False")),
    Bug("broken passes are not seen when a forward begins", "broken-passes", condition("False")),
    Bug("borrowed units of an interrupted forward stay", "interrupted-borrowed", removed),
    Bug("one backward begins twice", "begins-once", condition("False")),
    Bug("a backward does not compare versions", "check-unchanged", removed),
    Bug("a backward without a weight may end a step with weights", "check-weight", removed),
    Bug("a pass does not know its calls", "calls-of-pass", removed),
    Bug("a pass does not know its units", "units-of-pass", removed),
    Bug("nothing is gathered ahead in backward", "ahead-in-backward", removed),
    Bug("a gradient that comes unannounced is not noted", "gradient-came", removed),
    Bug("a second backward begins with what an error has left", "pass-forgets", removed),
    Bug("one backward ends twice", "ends-once", condition("False")),
    Bug("the first call of several sends the gradients", "last-call", condition("True")),
    Bug("what a rerun made whole stays until the pass ends", "rerun-ends", removed),
    Bug("all is sent when the pass ends", "reduce-early", removed),
    Bug("a pass that ends keeps its leases", "pass-ends-backward", removed),
    Bug("a pass that ends keeps what reruns made whole", "pass-ends-rerun", removed),
    Bug("a pass within another one ends it", "outermost-pass", condition("True")),
    Bug("what was gathered ahead stays when backward ends", "pass-forgets-ahead", removed),
    Bug("a pass ends before its last reduction", "pass-waits-reduce", removed),
    Bug("a pass does not end the step", "pass-ends-step", removed),
    Bug("gradients that nobody announced are not looked for", "unannounced", value("[]")),
    Bug("frozen units send gradients", "reduce-trained", condition("False")),
    Bug("gradients do not wait for the last microbatch", "hold-first", condition("False")),
    Bug("two reductions at a time", "one-at-a-time", removed),
    Bug("gradients that lay aside are given their weight again", "weight-once", argument(0, "unit.accumulation.weight")),
    Bug("what was sent lies aside", "sent", removed),
    Bug("nobody waits for a reduction", "wait-reduce", removed),
    Bug("each microbatch gives gradients", "give-in-last", condition("True")),
    Bug("a backward that raised is not seen", "is-broken", condition("False")),
    Bug("what lies aside is not sent when a step ends", "finish-sends", removed),
    Bug("a step ends before its last reduction", "finish-waits", removed),
    Bug("sums are not given when a step ends", "finish-gives", removed),
    Bug("units stay whole when a step ends", "finish-ends", removed),
    Bug("weights do not add up", "sum-of-weights", value("weight")),
    Bug("a step goes on though gradients were lost", "check-lost", removed),
    Bug("what was lost last is not known when a step ends", "lost-at-the-end", removed),
    Bug("a step that failed keeps its gradients", "failed-step", removed),
    Bug("a step does not end with its last microbatch", "finish-step", removed),
    Bug("a microbatch does not end", "goes-on", removed),
]  # fmt: skip

ALL = [*ENGINE, *REDUNDANT, *BY_HAND, *GLUE, *REGIONS, *STEPS, *SHARDING]
