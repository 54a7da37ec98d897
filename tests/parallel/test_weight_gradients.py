"""A backward in two parts adds up to the gradients of one backward, to the bit, and leaves nothing behind."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.parallel.weight_gradients import DeferredWeights, _Branching, backward_of_inputs
from support.campaign import share

WIDTH = 4


class RandomProgram:
    """A graph of layers, sums and products over some inputs and weights, of which some are used often and some never."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        choose = random.Random(seed)
        self.inputs = [
            torch.randn(3, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)
        ]
        self.weights = [
            torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(choose.random() < 0.8)
            for _ in range(choose.randint(1, 5))
        ]
        biases = [torch.randn(WIDTH, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        constant = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
        values = [*self.inputs, constant]
        transposed = [weight.t() for weight in self.weights]  # one view, shared by its users
        for _ in range(choose.randint(1, 8)):
            x, y, number = choose.choice(values), choose.choice(values), choose.randrange(len(self.weights))
            weight, bias = self.weights[number], choose.choice(biases)
            made = choose.choice(
                [
                    lambda x=x, w=weight, b=bias: nn.functional.linear(x, w, b),
                    lambda x=x, w=transposed[number]: x @ w,
                    lambda x=x, w=weight: torch.tanh(x) * w.sum(),
                    lambda x=x, w=weight, b=bias: nn.functional.layer_norm(x, (WIDTH,), w[0], b),
                    lambda x=x, y=y: x * torch.sigmoid(y),
                    lambda x=x, w=weight: x + (w @ w)[:3],
                    lambda x=x: x.detach() + 1,
                ]
            )()
            values.append(made)
        self.weights += biases
        found = [value for value in values[3:] if value.requires_grad]
        self.outputs = choose.sample(found, min(len(found), 2))
        self.gradients = [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in self.outputs]

    def grads(self) -> list[torch.Tensor | None]:
        return [leaf.grad for leaf in (*self.inputs, *self.weights)]

    def in_two(self) -> DeferredWeights:
        return backward_of_inputs(self.outputs, self.gradients, self.inputs)


def same(left: list[torch.Tensor | None], right: list[torch.Tensor | None]) -> bool:
    """Equal but for the order in which the uses of one weight are added up."""
    return all(
        (a is None or not a.any()) if b is None else a is not None and torch.allclose(a, b, rtol=1e-13, atol=1e-13)
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("seed", share(5000, 200))
def test_both_parts_add_up_to_one_backward(seed: int) -> None:
    whole, parts = RandomProgram(seed), RandomProgram(seed)
    if not whole.outputs:
        return
    torch.autograd.backward(whole.outputs, whole.gradients)
    left = parts.in_two()
    assert same(parts.grads()[:2], whole.grads()[:2])
    assert all(weight.grad is None for weight in left.weights)
    left.run()
    left.run()  # nothing is left for a second time
    assert same(parts.grads(), whole.grads())


def test_many_of_the_random_weights_wait() -> None:
    programs = [program for seed in range(80) if (program := RandomProgram(seed)).outputs]
    deferred, done = 0, 0
    for program in programs:
        left = program.in_two()
        deferred, done = deferred + len(left.weights), done + len(left.done)
        left.run()
    assert deferred > 50
    assert done > 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.convolution = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(x))) + self.convolution(x)


def test_of_a_block_of_a_transformer_all_weights_wait_and_every_bit_is_the_same() -> None:
    torch.manual_seed(0)
    block = Block()
    x, gradient = torch.randn(2, 4, 8, requires_grad=True), torch.randn(2, 4, 8)
    block(x).backward(gradient)
    expected = [x.grad, *(weight.grad for weight in block.parameters())]
    x.grad = None
    block.zero_grad()
    left = backward_of_inputs([block(x)], [gradient], [x])
    assert left.done == []
    assert len(left.weights) == len(list(block.parameters()))
    left.run()
    found = [x.grad, *(weight.grad for weight in block.parameters())]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_function_of_the_users_own_runs_once() -> None:
    calls = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, gradient):
            calls.append(ctx.needs_input_grad)
            x, weight = ctx.saved_tensors
            return gradient * weight, (gradient * x).sum(0)

    layer, scale = nn.Linear(4, 4), torch.randn(4, requires_grad=True)
    x = torch.randn(2, 4, requires_grad=True)
    left = backward_of_inputs([Scale.apply(layer(x), scale).sum()], [None], [x])
    assert [weight is scale for weight in left.done] == [True]
    assert len(left.weights) == 2
    left.run()
    assert len(calls) == 1


def test_what_is_no_weight_of_the_module_gets_its_gradient_as_well() -> None:
    """For example a weight of the loss, and a keyword that needs a gradient."""
    layer = nn.Linear(4, 4)
    of_loss, keyword = (torch.randn(4, requires_grad=True) for _ in range(2))
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad((layer(x) * keyword * of_loss).sum(), [of_loss, keyword])
    left = backward_of_inputs([(layer(x) * keyword * of_loss).sum()], [None], [x])
    assert of_loss.grad is keyword.grad is None
    left.run()
    assert torch.equal(of_loss.grad, expected[0])
    assert torch.equal(keyword.grad, expected[1])


def test_hooks_of_weights_run_once_when_their_gradient_is_there() -> None:
    layer, seen = nn.Linear(4, 4), []
    layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    x = torch.randn(2, 4, requires_grad=True)
    left = backward_of_inputs([layer(x).sum()], [None], [x])
    assert seen == []
    left.run()
    assert len(seen) == 1
    assert torch.equal(seen[0], layer.weight.grad)


def test_hooks_of_a_result_inside_count_once() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.seen = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.zeros(2, 4)

        def double(self, gradient: torch.Tensor) -> torch.Tensor:
            self.seen += gradient
            return gradient * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.layers
            self.hidden = first(x)
            self.hidden.register_hook(self.double)
            self.hidden.retain_grad()
            return second(torch.tanh(self.hidden)).sum()

    torch.manual_seed(0)
    stage, x = Hooked(), torch.randn(2, 4, requires_grad=True)
    grads = []
    for is_whole in (True, False):
        stage.zero_grad()
        stage.seen, x.grad = torch.zeros(2, 4), None
        if is_whole:
            stage(x).backward()
        else:
            backward_of_inputs([stage(x)], [None], [x]).run()
        grads.append([x.grad, stage.seen, stage.hidden.grad, *(weight.grad for weight in stage.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def test_gradients_that_are_there_are_added_to() -> None:
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    layer(x).sum().backward()
    once = layer.weight.grad.clone()
    backward_of_inputs([layer(x).sum()], [None], [x]).run()
    assert torch.equal(layer.weight.grad, once + once)


def test_an_exception_in_backward_leaves_no_hook() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("on purpose")

    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    output = nn.functional.linear(Fails.apply(x), layer.weight)
    with pytest.raises(ValueError, match="on purpose") as caught:
        backward_of_inputs([output.sum()], [None], [x])
    del caught
    gc.collect()
    # A hook that stayed on a node of `output` would hold what it notes for.
    assert not [found for found in gc.get_objects() if isinstance(found, _Branching)]
    assert layer.weight.grad is None


class Packed:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_the_graph_goes_with_the_second_part_without_the_collector() -> None:
    layer, x, kept = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True), []
    layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), layer)

    def pack(tensor: torch.Tensor) -> Packed:
        packed = Packed(tensor.detach())  # with its graph, a result that its own op saves would be a cycle
        kept.append(weakref.ref(packed))
        return packed

    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
            output = layers(x).sum()
        left = backward_of_inputs([output], [None], [x])
        del output
        assert any(packed() is not None for packed in kept)
        left.run()
        del left
        assert [packed() for packed in kept if packed() is not None] == []
    finally:
        gc.enable()
