"""Whether a schedule works, seen by running it with tokens for tensors: each send blocks, ranks take turns in a random order."""

import random
from collections import Counter

from hyper_parallel import Schedule

TAKES = {
    "F": ["input"], "B": ["saved", "grad"], "I": ["saved", "grad"], "W": ["half"], "SEND_F": ["output"], "SEND_B": ["back"],
    "UNSHARD": ["sharded"], "RESHARD": ["whole"], "REDUCE_GRAD": ["owed"],
}  # fmt: skip
GIVES = {"F": ["saved"], "B": ["sum"], "I": ["half"], "W": ["sum"], "UNSHARD": ["whole"], "RESHARD": ["sharded"]}


class Player:
    def __init__(self, schedule: Schedule, seed: int) -> None:
        self.lists, self.random = [[*actions] for actions in schedule.ranks], random.Random(seed)
        self.rank_of, self.last = schedule.placement.rank_of, schedule.num_stages - 1
        self.kinds = {action.kind.value for actions in self.lists for action in actions}
        self.held, self.wanted = [Counter() for _ in self.lists], [Counter() for _ in self.lists]  # now; in the end
        for stage, microbatch in ((s, m) for s in range(self.last + 1) for m in range(schedule.num_microbatches)):
            home = self.rank_of(stage, microbatch)
            self.held[home]["input", stage, microbatch] += stage == 0
            self.held[home]["sharded", stage, None] = self.wanted[home]["sharded", stage, None] = 1
            self.wanted[home]["sum", stage, microbatch] = 1

    def works(self) -> bool:
        ranks = list(range(len(self.lists)))
        while any(self.lists[rank] and self.step(rank) for rank in ranks):
            self.random.shuffle(ranks)
        return self.held == self.wanted and not any(self.lists)

    def step(self, rank: int) -> bool:
        """Try to do what is next at a rank."""
        action, peer = self.lists[rank][0], rank
        parts = [(part.kind.value, part.stage, part.microbatch) for part in action.parts or (action,)]
        (kind, stage, microbatch), to = parts[0], -1
        if kind.startswith("SEND"):
            to = stage + (1 if kind == "SEND_F" else -1)
            receive = (to, kind.replace("SEND", "RECV"), microbatch, ())
            peer = next((other for other, actions in enumerate(self.lists) if actions[:1] == [receive]), rank)
        takes = Counter((taken, s, m) for k, s, m in parts for taken in TAKES.get(k, ["never"]))
        has_leases = bool(self.kinds & {"UNSHARD", "RESHARD"})
        is_whole = not has_leases or all(self.held[rank]["whole", s, None] for k, s, _ in parts if k in "FBIW")
        if not takes <= self.held[rank] or not is_whole or (kind.startswith("SEND") and peer == rank):
            return False  # a receive takes what is never there: its sender does both
        self.held[rank] -= takes
        self.lists[rank].pop(0)
        if peer != rank:
            self.lists[peer].pop(0)
            self.held[peer]["input" if kind == "SEND_F" else "grad", to, microbatch] += 1
        for k, s, m in parts:
            self.held[rank].update((given, s, None if "SHARD" in k else m) for given in GIVES.get(k, []))
            self.held[rank]["owed", s, None] |= k in "BW" and "REDUCE_GRAD" in self.kinds
            if k == "F" and s == self.last:
                self.held[rank]["grad", s, m] += 1
            elif k == "F" or (k in "BI" and s > 0):
                to, here, there = (s + 1, "output", "input") if k == "F" else (s - 1, "back", "grad")
                is_sent = self.rank_of(to, m) != rank and any("SEND" in name or "RECV" in name for name in self.kinds)
                self.held[rank if is_sent else self.rank_of(to, m)][(here, s, m) if is_sent else (there, to, m)] += 1
        return True
