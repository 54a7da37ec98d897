"""Random training programs on sharded units, without a framework and without processes.

A seed makes a model (units in units, tied and frozen ones, regions that run again) and some actions on it: steps of one
and of several microbatches, several forwards for one backward, forwards that nobody needs, errors and Ctrl-C anywhere.
Checked after every event: memory is there exactly while somebody has a lease. After every step: each gradient that a
backward left has come to its shard once, with its weight. In the end: nothing is left, nobody has raced, and no kernel
has read other values than those of its forward.

    Program(seed=7).run()

Two ranks differ in which parameters they use. Their lists of collectives (`program.rank.collectives`) must be the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding import order as real
from support.sharded_models import Call, Compute, Module, Region, Step, World
from support.sharding_cases import accumulating_of
from support.simulated_autograd import Autograd, Node, in_other_thread
from support.simulated_units import Rank, SimulatedUnitMemory

ACTIONS = (
    "step", "step_in_another_order", "two_forwards", "chunked_loss", "part_of_the_model", "look_without_gradients",
    "forward_that_is_dropped", "error_in_forward", "error_in_backward", "backward_again_after_an_error", "accumulated",
    "error_in_accumulation", "backward_between_weights", "weights_changed", "graph_of_an_earlier_step", "schedule",
    "two_models",
)  # fmt: skip


_CHANGED = "weights were changed between a forward and its backward, and nobody was told"


class FailureError(Exception):
    """What a user's code raises."""


class Interrupt(BaseException):
    """Ctrl-C: no hook is told."""


class Program:
    """`order` is the module with the code under test; `said` is which actions were played, and which errors came."""

    def __init__(
        self, seed: int, *, rank: int = 0, order: Any = real, actions: Sequence[str] = ACTIONS, num_actions: int = 5
    ) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.draws_of_rank = random.Random(f"{seed} {rank}")
        self.share_used = self.draws_of_rank.choice((1.0, 0.7, 0.3))
        self.modules = order
        self.actions = actions
        self.num_actions = num_actions
        self.autograd = Autograd(self._before_node, has_own_thread=self.draw.random() < 0.15)
        self.rank = Rank(seed, 2, self.autograd.at_end_of_backward)
        self.rank.before_gather = self._before_gather
        self.order = order.Order()
        self.world = World(self.autograd, self.rank, self.order, self._uses, self._tick, self._check)
        self.zero = self.draw.choice((1, 2, 3, 3))
        self.prefetch = self.draw.choice((0, 1, 1, 2, 3))
        self.units: list[Any] = []
        self.ticks_left: int | None = None  # computations of forward until `raises`
        self.nodes_left: int | None = None
        self.gathers_left: int | None = None
        self.raises: type[BaseException] = FailureError
        self.at_node: tuple[int, Callable[[], None]] | None = None
        self.expected: dict[tuple[str, int], Fraction] = {}
        self.hides_outputs = self.draw.random() < 0.1  # of one block
        self.said: list[str] = []  # which actions were played
        self._make_model()

    # -- the model -----------------------------------------------------------------------------------------------------

    def _unit(self, name: str) -> Any:
        memory = SimulatedUnitMemory(self.rank, name, (f"{name}.p", f"{name}.q"), self.draw.choice((8, 16)))
        memory.is_trained = self.draw.random() < 0.85
        unit = self.modules.Unit(name, memory, self.order, zero=self.zero, prefetch=self.prefetch)
        self.units.append(unit)
        return unit

    def _make_model(self) -> None:
        draw = self.draw
        inner = [self._block(f"block{number}") for number in range(draw.randint(2, 4))]
        self.embedding = Module("embedding", self._unit("embedding"))
        self.embedding.body = [Compute(self.embedding.unit)]
        self.head = Module("head", self._unit("head"))
        self.head.body = [Compute(self.head.unit)]
        if draw.random() < 0.5:
            self.head.unit.borrowed = (self.embedding.unit,)
            self.head.body = [*self.head.body, Compute(self.embedding.unit)]
        self.blocks: list[Step] = []
        while inner:
            some = [Call(inner.pop(0)) for _ in range(min(len(inner), draw.randint(1, 2)))]
            self.blocks.append(self._region(some) if draw.random() < 0.4 else some[0])
            self.blocks += some[1:] if self.blocks[-1] is some[0] else []
        root = self._unit("model")
        self.root = Module("model", root)
        self.first: list[Step] = (
            [Compute(root), Call(self.embedding)] if draw.random() < 0.5 else [Call(self.embedding)]
        )
        self.last: list[Step] = (
            [Compute(root), Call(self.head)] if draw.random() < 0.5 else [Call(self.head), Compute(root)]
        )

    def _block(self, name: str) -> Module:
        unit = self._unit(name)
        hides_outputs = self.hides_outputs and name == "block0"
        unit.memory.is_trained |= hides_outputs  # of one that is frozen as well nobody would know anything
        body: list[Step] = [Compute(unit) for _ in range(self.draw.randint(1, 2))]
        kind = self.draw.random()
        if kind < 0.25:
            inner = Module(f"{name}.inner", self._unit(f"{name}.inner"))
            inner.body = [Compute(inner.unit)]
            body.insert(self.draw.randrange(2), Call(inner))
        elif kind < 0.5 and not hides_outputs:
            body.insert(1, self._region([Compute(unit), Compute(unit)]))
        return Module(name, unit, body, hides_outputs, self.draw.randint(1, 2))

    def _region(self, steps: Sequence[Step]) -> Region:
        return Region(steps, self.draw.random() < 0.4, self.draw.choice((None, None, 1, 2)))

    # -- what happens in it --------------------------------------------------------------------------------------------

    def _uses(self, parameter: str) -> bool:
        return self.draws_of_rank.random() < self.share_used

    def _tick(self) -> None:
        if self.ticks_left is not None:
            self.ticks_left -= 1
            if self.ticks_left < 0:
                self.ticks_left = None
                raise self.raises

    def _before_gather(self) -> None:
        if self.gathers_left is not None:
            self.gathers_left -= 1
            if self.gathers_left < 0:
                self.gathers_left = None
                raise self.raises

    def _before_node(self) -> None:
        if self.at_node is not None:
            left, then = self.at_node
            self.at_node = (left - 1, then) if left else None
            if not left:
                then()
        if self.nodes_left is not None:
            self.nodes_left -= 1
            if self.nodes_left < 0:
                self.nodes_left = None
                raise self.raises

    def _check(self) -> None:
        ahead = 0
        for unit in self.units:
            memory = unit.memory
            assert memory.is_there == unit.is_leased, f"{unit}, and memory is there: {memory.is_there}"
            # A gather that found no room leaves leases until the next forward.
            assert memory.is_shown == unit.is_shown or unit._is_gathering, (
                f"{unit}, and modules have the whole: {memory.is_shown}"
            )
            ahead += unit.has(self.modules.Lease.AHEAD)
        assert ahead <= self.prefetch, f"{ahead} units are gathered ahead"
        assert len(self.rank.reducing) <= 1, f"on their way: {self.rank.reducing}"

    # -- words ---------------------------------------------------------------------------------------------------------

    def forward(self, *, blocks: Sequence[Step] | None = None, until_head: bool = False) -> Node | None:
        self.root.body = [*self.first, *(self.blocks if blocks is None else blocks), *([] if until_head else self.last)]
        return self.root(self.world, None)

    def backward(self, *outputs: Node | None, weight: Fraction | int = 1) -> None:
        """Note what the gradients must count, before division."""
        found = [output for output in outputs if output is not None]
        begin = len(self.world.executed)
        try:
            if found:
                self.autograd.backward(*found)
        finally:
            for key in self.world.executed[begin:]:
                self.expected[key] = self.expected.get(key, Fraction(0)) + Fraction(weight)

    def check_gradients(self, divisor: Fraction | int = 2) -> None:
        expected = {key: factor / divisor for key, factor in self.expected.items()} if divisor else self.expected
        assert self.rank.given == expected, f"given {self.rank.given}, expected {expected}"
        self.zero_grad()

    def zero_grad(self) -> None:
        self.world.executed.clear()
        self.expected.clear()
        self.rank.given.clear()

    def optimize(self) -> None:
        for unit in self.units:
            if unit.memory.is_trained:
                unit.memory.write_shards()
            elif not unit.is_leased and self.draw.random() < 0.3:
                unit.memory.replace_shards()

    @contextmanager
    def failing(self, *, in_backward: bool) -> Iterator[None]:
        """What is inside may be cut short, by an error or by Ctrl-C. Whatever gradients there are then are dropped."""
        self.raises = self.draw.choice((FailureError, Interrupt))
        number = self.draw.randrange(12)
        if self.draw.random() < 0.2:
            self.raises, self.gathers_left = FailureError, number
        elif in_backward and self.draw.random() < 0.6:
            self.nodes_left = number
        elif in_backward:
            self.ticks_left = number % 4  # of a rerun
        else:
            self.ticks_left = number
        try:
            yield
        except (FailureError, Interrupt) as error:
            self.said.append(type(error).__name__)
            self._leave_gathers()
        finally:
            self.ticks_left = self.nodes_left = self.gathers_left = None

    def _leave_gathers(self) -> None:
        """An error has left gathers that may still read shards. What they bring is never used, so it may be anything."""
        self.rank.compute.wait_event(self.rank.communication.record_event())

    def accumulate(self, **how: Any) -> Any:
        return accumulating_of(self.modules)(self.units[::-1], **how)

    # -- actions -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        actions = [getattr(self, name) for name in self.actions]
        if self.hides_outputs:  # nobody knows when a second backward of one forward comes
            actions = [self.step, self.step_in_another_order, self.look_without_gradients, self.error_in_forward]
        for _ in range(self.num_actions):
            action = self.draw.choice(actions)
            self.said.append(action.__name__)
            action()
            self._check()
            if self.draw.random() < 0.8:
                self.optimize()
        self.step()
        self._check_end()

    def step(self) -> None:
        self.backward(self.forward())
        self.check_gradients()
        self._check_rest()

    def step_in_another_order(self) -> None:
        self.backward(self.forward(blocks=self.draw.sample(self.blocks, len(self.blocks))))
        self.check_gradients()

    def two_forwards(self) -> None:
        outputs = [self.forward(), self.forward()]
        self.draw.shuffle(outputs)
        if self.draw.random() < 0.5:
            self.backward(*outputs)
        else:
            for output in outputs:
                self.backward(output)
        self.check_gradients()

    def chunked_loss(self) -> None:
        hidden = self.forward(until_head=True)
        losses = [self.head(self.world, hidden) for _ in range(self.draw.randint(2, 4))]
        if self.draw.random() < 0.5:
            self.backward(*losses)
        else:
            for loss in losses:
                self.backward(loss)
        self.check_gradients()

    def part_of_the_model(self) -> None:
        self.backward(self.draw.choice(self.blocks)(self.world, None))
        self.check_gradients()

    def look_without_gradients(self) -> None:
        with self.autograd.recording(False):
            self.forward()
        assert not any(unit.has(self.modules.Lease.AHEAD) for unit in self.units), "gathered ahead, and not used"

    def forward_that_is_dropped(self) -> None:
        self.forward()

    def two_models(self) -> None:
        """The blocks alone are another model, which begins within the first one's step."""
        output = self.forward()
        other = self.draw.choice(self.blocks)(self.world, None)
        self.backward(output)
        self.backward(other)
        self.check_gradients()

    def error_in_forward(self) -> None:
        with self.failing(in_backward=False):
            self.forward()
        self.zero_grad()

    def error_in_backward(self) -> None:
        output = self.forward()
        with self.failing(in_backward=True):
            self.backward(output)
        self.zero_grad()

    def backward_again_after_an_error(self) -> None:
        output = self.forward()
        with self.failing(in_backward=True):
            self.backward(output)
        self.zero_grad()
        self.backward(output)
        self.check_gradients()

    def accumulated(self) -> None:
        """Several microbatches; the last may have no backward, and others may be in flight."""
        draw = self.draw
        number, has_weights = draw.randint(1, 4), draw.random() < 0.5
        weights = [draw.randint(0, 3) if has_weights else None for _ in range(number)]
        last_is_empty = draw.random() < 0.2
        for at, weight in enumerate(weights):
            with self.accumulate(
                last=at == number - 1, weight=weight, reduce=draw.choice((None, None, "each", "last"))
            ):
                if last_is_empty and at == number - 1:
                    continue
                blocks = draw.sample(self.blocks, draw.randint(1, len(self.blocks)))
                self.backward(self.forward(blocks=blocks), weight=1 if weight is None else weight)
        divisor = 2 * sum(weight for weight in weights if weight is not None) if has_weights else 2
        if divisor:
            self.check_gradients(divisor)
        self.zero_grad()
        self._check_nothing_stays()

    def error_in_accumulation(self) -> None:
        """The step is begun again. Who goes on after an error is told, unless nothing of earlier microbatches is lost."""
        is_caught_inside = self.draw.random() < 0.5
        with self.accumulate(last=False, weight=None, reduce=None):
            self.backward(self.forward())
        earlier = dict(self.expected)
        try:
            with self.accumulate(last=True, weight=None, reduce=None):
                output, num_said = self.forward(), len(self.said)
                with self.failing(in_backward=True):
                    self.backward(output)
                if len(self.said) > num_said:
                    if not is_caught_inside:
                        raise FailureError
                    self.expected = earlier
                    if self.draw.random() < 0.5:
                        self.backward(self.forward())
        except (FailureError, StateError):
            self.said.append("begun again")
            self.zero_grad()
            return
        self.check_gradients()

    def backward_between_weights(self) -> None:
        """A backward outside of `accumulate` would divide sums by the number of ranks that have weights in them."""
        with self.accumulate(last=False, weight=2, reduce=self.draw.choice(("each", "last"))):
            self.backward(self.forward())
        self._must_raise(self.forward(), "a backward without a weight has ended a step with weights")
        with suppress(FailureError), self.accumulate(last=True, weight=1, reduce=None):
            raise FailureError  # so that the step is given up
        self.zero_grad()

    def weights_changed(self) -> None:
        output = self.forward()
        units = [self.head.unit, self.embedding.unit, self.root.unit]
        unit = self.draw.choice([each for each in units if each.memory.is_trained] or units[:1])
        unit.memory.write_shards()
        self._must_raise(output, _CHANGED)

    def graph_of_an_earlier_step(self) -> None:
        output = self.forward()
        self.backward(output)
        self.check_gradients()
        for unit in self.units:
            unit.memory.write_shards()
        self._must_raise(output, _CHANGED)

    def _must_raise(self, output: Node | None, else_say: str) -> None:
        if output is None:
            return
        try:
            self.backward(output)
        except StateError:
            self._leave_gathers()
            self.zero_grad()
            return
        raise AssertionError(else_say)

    def schedule(self) -> None:
        """Units are whole from outside, and a forward of another thread runs in the middle of a backward."""
        for unit in self.units:
            unit.unshard()
        later: list[Node | None] = []

        def forward() -> None:
            later.append(self.forward())

        with self.accumulate(last=False, weight=None, reduce="last"):
            output = self.forward()
            self.at_node = (self.draw.randrange(6), lambda: in_other_thread(forward))
            self.backward(output)
            if self.at_node is not None:
                self.at_node = None
                forward()
            self.backward(*later)
        with self.accumulate(last=True, weight=None, reduce="last"):
            pass
        for unit in self.units:
            unit.reshard()
        self.check_gradients()

    # -- the end -------------------------------------------------------------------------------------------------------

    def _check_rest(self) -> None:
        """When a step is over, nobody keeps a unit for the reasons of forward and backward."""
        lease = self.modules.Lease
        for unit in self.units:
            left = [each for each in (lease.FORWARD, lease.BACKWARD, lease.RERUN, lease.AHEAD) if unit.has(each)]
            assert not left, f"after the step: {unit}"
        self._check_nothing_stays()
        assert not self.order._passes, "a pass has not ended"

    def _check_nothing_stays(self) -> None:
        for unit in self.units:
            if not unit.hides_outputs:
                assert not unit.has(self.modules.Lease.STEP), f"after the step: {unit}"

    def _check_end(self) -> None:
        self.rank.device.finish()
        assert not self.rank.wrong, self.rank.wrong
        assert not self.rank.device.races, self.rank.device.races
        assert not self.rank.reducing, self.rank.reducing
        for unit in self.units:
            memory = unit.memory
            assert not memory.has_sums, f"{unit}: sums are left"
            assert not memory.holds_gradients, f"{unit}: gradients are left"
