"""Whether a schedule works, seen by running it with tokens for tensors: each send blocks, and ranks take turns in a random order.

An action takes tokens and gives others; a compute action looks whether its parameters are whole. Nothing here is the checker's.
"""

from __future__ import annotations

import random
from collections import Counter

from hyper_parallel import Schedule

TAKES = {
    "F": ["input"], "B": ["saved", "grad"], "I": ["saved", "grad"], "W": ["half"], "SEND_F": ["output"], "SEND_B": ["back"],
    "UNSHARD": ["sharded"], "RESHARD": ["whole"], "REDUCE_GRAD": ["owed"],
}  # fmt: skip
GIVES = {"F": ["saved"], "B": ["sum", "owed"], "I": ["half"], "W": ["sum", "owed"], "UNSHARD": ["whole"], "RESHARD": ["sharded"]}


class Player:
    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.lists = [[*actions] for actions in schedule.ranks]
        self.random, self.rank_of, self.last = random.Random(seed), schedule.placement.rank_of, schedule.num_stages - 1
        self.kinds = {action.kind.value for actions in self.lists for action in actions}
        self.held = [Counter() for _ in self.lists]  # tokens of each rank
        self.wanted = [Counter() for _ in self.lists]  # in the end
        for stage in range(self.last + 1):
            for microbatch in range(schedule.num_microbatches):
                home = self.rank_of(stage, microbatch)
                self.held[home]["input", stage, microbatch] += stage == 0
                self.held[home]["sharded", stage, None] = self.wanted[home]["sharded", stage, None] = 1
                self.wanted[home]["sum", stage, microbatch] = 1

    def works(self) -> bool:
        while any([self.step(rank) for rank in self.random.sample(range(len(self.lists)), len(self.lists)) if self.lists[rank]]):
            pass
        return self.held == self.wanted and not any(self.lists)

    def step(self, rank: int) -> bool:
        """Try to do what is next at a rank."""
        action, peer = self.lists[rank][0], rank
        parts = [(part.kind.value, part.stage, part.microbatch) for part in action.parts or (action,)]
        kind, stage, microbatch = parts[0]
        if kind.startswith("SEND"):
            to = stage + (1 if kind == "SEND_F" else -1)
            receive = (to, kind.replace("SEND", "RECV"), microbatch, ())
            peer = next((other for other, actions in enumerate(self.lists) if other != rank and actions[:1] == [receive]), rank)
        takes = Counter((token, s, m) for k, s, m in parts for token in TAKES.get(k, ["never"]))
        is_whole = not self.kinds & {"UNSHARD", "RESHARD"} or all(self.held[rank]["whole", s, None] for k, s, _ in parts if k in "FBIW")
        if not takes <= self.held[rank] or not is_whole or (kind.startswith("SEND") and peer == rank):
            return False  # a receive takes what is never there: its sender does both
        self.held[rank] -= takes
        self.lists[rank].pop(0)
        if peer != rank:
            self.lists[peer].pop(0)
            self.held[peer]["input" if kind == "SEND_F" else "grad", to, microbatch] += 1
        for k, s, m in parts:
            for token in GIVES.get(k, []):
                if token != "owed":
                    self.held[rank][token, s, None if token in ("whole", "sharded") else m] += 1
                elif "REDUCE_GRAD" in self.kinds:
                    self.held[rank]["owed", s, None] = 1
            if k == "F" and s == self.last:
                self.held[rank]["grad", s, m] += 1
            elif k == "F" or (k in "BI" and s > 0):
                home = self.rank_of(s + 1 if k == "F" else s - 1, m)
                if home != rank and any("SEND" in name or "RECV" in name for name in self.kinds):
                    self.held[rank]["output" if k == "F" else "back", s, m] += 1
                else:
                    self.held[home]["input" if k == "F" else "grad", s + 1 if k == "F" else s - 1, m] += 1
        return True
