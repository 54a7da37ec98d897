"""Random training programs on the simulated device: the engine's own objects, wrong numbers and races looked for at every step."""

from __future__ import annotations

import random
from typing import Any

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.swap import engine as engine_module
from hyper_parallel.core.swap.slot import Handle
from support.simulated_device import SimulatedBuffer, SimulatedDevice
from support.simulated_tier import SimulatedTier

SIZES = (1, 2, 3, 5, 8, 16, 33)


class WrongError(AssertionError):
    """Backward got a number that forward did not save."""


class Saved:
    """One saved storage: what was in it, and the handles that autograd would hold."""

    def __init__(self, value: str, handles: list[Handle]) -> None:
        self.value = value
        self.handles = handles


class Layer(list[Saved]):
    """What one layer saved; `expected`: the order in which backward will ask for what was there when the engine was told one."""

    def __init__(self, group: Any, saved: list[Saved]) -> None:
        super().__init__(saved)
        self.group = group
        self.expected: list[Saved] = []

    def in_order(self) -> list[Saved]:
        return [*(saved for saved in reversed(self) if saved not in self.expected), *self.expected]


class Forward:
    """One forward that is alive: its layers, and the stream it ran on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.layers: list[Layer] = []


def order(earlier: Any, later: Any) -> None:
    """The program's own order of two streams. A failure that is injected here ends the program, but memory it used goes back in order."""
    try:
        later.wait_event(earlier.record_event())
    except Exception:
        later.wait_event(earlier.record_event())
        raise


class Program:
    """A random program. `run()` raises for a wrong number, a race, a leak or a broken promise; the seed names it."""

    def __init__(
        self, seed: int, *, modules: Any = engine_module, num_actions: int = 14, **device_options: Any
    ) -> None:
        self.seed = seed
        self.modules = modules
        self.random = random.Random(seed)
        self.device = SimulatedDevice(seed, counts_bytes=seed % 2 == 1, **device_options)
        choose = self.random.choice
        self.budget_bytes = choose((1 << 30, 1 << 30, 1 << 30, 60))
        self.tier = SimulatedTier(self.device, choose(("host", "disk")), self.budget_bytes)
        self.limits = modules.Limits(choose((1, 8, 20, 60)), choose((1, 10, 40, 200)), choose(("wait", "wait", "keep")))
        self.engine = modules.SwapEngine(self.device, [self.tier], self.limits)
        self.tells_order = choose((False, False, True))
        self.num_orders_seen = 0  # layers whose loads were compared with the order that was told
        self.num_actions = num_actions
        self.forwards: list[Forward] = []
        self.held: list[tuple[SimulatedBuffer, str, Any]] = []  # tensors that the user keeps, with value and stream
        self.read: list[tuple[str, Any]] = []  # (expected, got) of every kernel that read a saved value
        self.num_values = 0
        self.num_acquired = 0

    def run(self) -> None:
        for _ in range(self.num_actions):
            self.step()
        while self.forwards:
            self.backward(self.forwards[-1], retain=False)
        self.finish()

    def step(self) -> None:
        action = self.random.random()
        if not self.forwards or (action < 0.4 and len(self.forwards) < 4):
            self.forward()
        elif action < 0.75:
            self.backward(self.random.choice(self.forwards[-2:]), retain=self.random.random() < 0.25)
        elif action < 0.8:
            self.forwards.remove(self.random.choice(self.forwards))  # dropped without a backward
        elif action < 0.9:
            self.read_held()
        else:
            self.engine.poll()

    def forward(self) -> None:
        stream = self.random.choice(self.device.compute_streams)
        forward = Forward(stream)
        with self.device.computing_on(stream):
            shared: tuple[SimulatedBuffer, str, Any] | None = None
            for number in range(self.random.randint(1, 4)):
                group = self.engine.new_group(f"layer {number}")
                layer = Layer(group, [self.save_new(group, stream) for _ in range(self.random.randint(0, 4))])
                if self.tells_order and self.random.random() < 0.7:
                    self.expect(layer, forward)
                if shared is not None and self.random.random() < 0.3:
                    layer.append(self.save(shared[0], shared[1], group))
                if self.held and self.held[-1][2] is stream and self.random.random() < 0.5:
                    shared = self.held[-1]
                forward.layers.append(layer)
                self.temporary()
        self.forwards.append(forward)

    def save_new(self, group: Any, stream: Any) -> Saved:
        self.num_values += 1
        value = f"value {self.num_values}"
        buffer = self.device.create(self.random.choice(SIZES), value, label=value)
        saved = self.save(buffer, value, group)
        if self.random.random() < 0.2:
            self.held = [*self.held[-3:], (buffer, value, stream)]
        return saved

    def save(self, buffer: SimulatedBuffer, value: str, group: Any) -> Saved:
        slot = self.engine.save(buffer, buffer.num_bytes, group, value, lambda: buffer.version)
        self.check_promises()
        return Saved(value, [self.modules.Handle(slot) for _ in range(self.random.choice((1, 1, 2, 3)))])

    def expect(self, layer: Layer, forward: Forward) -> None:
        """Tell an order of some of the layer's storages, with one of another layer's now and then."""
        told = self.random.sample(layer, self.random.randint(0, len(layer)))
        layer.expected = [*told, *(saved for saved in reversed(layer) if saved not in told)]
        others = [saved for other in forward.layers if other is not layer for saved in other]
        if others and self.random.random() < 0.2:
            told.insert(self.random.randint(0, len(told)), self.random.choice(others))
        slots = [saved.handles[0].slot for saved in told if saved.handles]
        self.engine.expect(layer.group, slots)

    def backward(self, forward: Forward, retain: bool) -> None:
        stream = forward.stream
        if self.random.random() < 0.1:
            # A user who runs backward on another stream orders the two by hand, both ways: memory goes back to the first.
            stream = self.random.choice(self.device.compute_streams)
            order(forward.stream, stream)
        escaped: list[tuple[SimulatedBuffer, str]] = []
        with self.device.computing_on(stream):
            for layer in reversed(forward.layers):
                asked = [(saved, handle) for saved in layer.in_order() for handle in saved.handles]
                away = self.away_in_order(layer)
                if self.random.random() < 0.3:
                    self.random.shuffle(asked)
                    away = []
                for saved, handle in asked:
                    if self.tells_order and self.random.random() < 0.1:
                        self.expect(layer, forward)  # backward is in the middle of it, and goes on as it pleases
                        away = []
                    buffer = self.engine.acquire(handle)
                    self.check_loads(away, saved)
                    self.num_acquired += 1
                    self.check_value(buffer, saved.value)
                    if self.random.random() < 0.1:
                        escaped.append((buffer, saved.value))  # a function that returns its saved tensor as gradient
                    if stream is not forward.stream:
                        order(stream, forward.stream)
                    if not retain:
                        saved.handles.remove(handle)
                    del buffer, handle
                    self.temporary()
                del asked, away
                self.check_released(layer)
                if not retain:
                    layer.clear()
                    layer.expected.clear()
            for buffer, value in escaped:
                self.check_value(buffer, value)
            order(stream, forward.stream)
            escaped.clear()
        if not retain:
            self.forwards.remove(forward)

    def away_in_order(self, layer: Layer) -> list[Saved]:
        """What has to be loaded for a layer, in the order in which backward will ask for it; nothing if some of it was loaded before.

        (Copies out that were not done yet are passed over by a prefetch: from then on the order is one of chance.)
        """
        slots = [saved.handles[0].slot for saved in layer if saved.handles]
        if any(slot.buffer is not None for slot in slots):
            return []
        if layer.group.cursor < len(layer.group.stack) - 1:
            return []
        self.num_orders_seen += 1
        return [saved for saved in layer.in_order() if saved.handles and saved.handles[0].slot.source is None]

    def check_loads(self, away: list[Saved], asked: Saved) -> None:
        """What was loaded by now comes, in the order that was told, before all that was not."""
        while away and (away[0] is asked or not away[0].handles or away[0].handles[0].slot.buffer is not None):
            away.pop(0)
        early = [saved.value for saved in away if saved.handles and saved.handles[0].slot.buffer is not None]
        if early:
            raise WrongError(f"seed {self.seed}: {early} came before {away[0].value}, which is asked for earlier")

    def check_value(self, buffer: SimulatedBuffer, value: str) -> None:
        self.device.kernel(reads=[buffer], fn=lambda got: self.read.append((value, got)), name=f"use {value}")

    def check_released(self, layer: list[Saved]) -> None:
        """Every handle has asked: what was loaded belongs to those who asked now, and to nobody else."""
        for saved in layer:
            for handle in saved.handles:
                if handle.slot.buffer is not None:
                    raise WrongError(
                        f"seed {self.seed}: {saved.value} is still held on the device after every handle asked"
                    )

    def temporary(self) -> None:
        """Other memory comes and goes on this stream: what was freed too early is overwritten."""
        if self.random.random() < 0.5:
            self.device.create(self.random.choice(SIZES), "temporary")

    def read_held(self) -> None:
        for buffer, value, stream in self.held:
            with self.device.computing_on(stream):
                self.check_value(buffer, value)

    def check_promises(self) -> None:
        held = self.engine._window.held_bytes
        if held > max(self.limits.window_bytes, max(SIZES)):
            raise WrongError(
                f"seed {self.seed}: the window holds {held} bytes, {self.limits.window_bytes} were promised"
            )

    def finish(self) -> None:
        self.read_held()
        self.held.clear()
        self.forwards.clear()
        self.engine.join()
        self.check_numbers()
        self.device.check_clean()

    def check_numbers(self) -> None:
        self.device.finish()
        wrong = [(value, got) for value, got in self.read if got != value]
        if wrong:
            raise WrongError(
                f"seed {self.seed}: saved {wrong[0][0]!r}, backward read {wrong[0][1]!r} ({len(wrong)} wrong)"
            )
        if self.engine.in_flight_bytes or self.tier.used_bytes:
            raise WrongError(
                f"seed {self.seed}: bytes left: {self.engine.in_flight_bytes} in flight, {self.tier.used_bytes} in the tier"
            )
        if self.engine.stats.offloaded_bytes != self.device.offloaded_bytes:
            raise WrongError(
                f"seed {self.seed}: counted {self.engine.stats.offloaded_bytes}, moved {self.device.offloaded_bytes}"
            )


class InPlaceProgram(Program):
    """Programs that change saved storages in place: each handle raises, or gives what was saved.

    The change races with the copy by design (that is the user's mistake), so races are not looked for here.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, raise_races=False, **options)
        self.num_errors = 0
        self.must_raise: set[str] = set()

    def change(self, buffer: SimulatedBuffer, value: str, slot: Any) -> None:
        if slot.source is not None:
            self.must_raise.add(value)
        self.device.kernel(writes=[buffer], fn=lambda: f"{value}, changed")

    def run(self) -> None:
        stream = self.random.choice(self.device.compute_streams)
        with self.device.computing_on(stream):
            saved: list[Saved] = []
            for number in range(self.random.randint(1, 6)):
                group = self.engine.new_group(f"layer {number}")
                self.num_values += 1
                value = f"value {self.num_values}"
                buffer = self.device.create(self.random.choice(SIZES), value, label=value)
                if self.random.random() < 0.3:
                    self.device.kernel(writes=[buffer], fn=lambda value=value: value)  # before it is saved: harmless
                saved.append(self.save(buffer, value, group))
                slot = saved[-1].handles[0].slot
                for _ in range(self.random.randint(0, 3)):
                    self.temporary()
                    self.engine.poll()
                if self.random.random() < 0.5:
                    self.change(buffer, value, slot)
                del buffer, slot
            for entry in reversed(saved):
                while entry.handles:
                    self.ask(entry.handles.pop(), entry.value)
            saved.clear()
        self.engine.join()
        self.device.races.clear()
        self.check_numbers()
        self.device.check_clean()

    def ask(self, handle: Handle, value: str) -> None:
        try:
            buffer = self.engine.acquire(handle)
        except StateError as error:
            if value not in self.must_raise or "changed in place" not in str(error):
                raise WrongError(f"seed {self.seed}: false alarm for {value}: {error}") from error
            self.num_errors += 1
            return
        if value in self.must_raise:
            raise WrongError(f"seed {self.seed}: {value} was changed and nobody said so")
        self.check_value(buffer, value)
