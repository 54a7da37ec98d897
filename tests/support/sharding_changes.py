"""What users do to a sharded model between its steps and within them: errors, edits, loads, copies, optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from support.sharding import WIDTH, Of, Program, Run
from support.sharding_programs import (
    Block,
    Stack,
    blocks_and_all,
    children_and_all,
    of_width,
    one,
    tied_across,
    tied_within,
    tokens,
)

# -- errors, and the step after them -----------------------------------------------------------------------------------


def fails_first(step: Callable[[Run, Any], None], error: type[BaseException], place: str) -> Any:
    """The step, after one that ended with an error in forward or backward of a module; its graph may be alive still."""

    def run_step(run: Run, model: Any) -> None:
        if run.is_sharded:

            def fail(*_: object) -> None:
                raise error("on purpose")

            module, _, phase = place.partition(":")
            inner = model.get_submodule(module)
            if phase == "forward":
                handle = inner.register_forward_hook(fail)
            else:
                handle = inner.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
            try:
                step(Run(run.rank, run.number, is_sharded=True), model)
            except error:
                pass
            else:
                raise AssertionError("the step did not fail")
            handle.remove()
            model.zero_grad()  # as in one process, units that backward has left have their gradients already
        step(run, model)

    return run_step


def fails_while_it_evaluates(run: Run, model: Any) -> None:
    if run.is_sharded:
        handle = model.blocks[1].up.register_forward_pre_hook(_interrupt)
        try:
            with torch.no_grad():
                model(run.data(3, 4))
        except KeyboardInterrupt:
            pass
        handle.remove()
        with torch.no_grad():
            model.blocks[0](run.data(3, WIDTH))  # another unit is the outermost one now
    one(run, model)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def abandoned_graph(run: Run, model: nn.Module) -> None:
    """Forwards whose graphs are dropped, and one that lives on over the steps."""
    if run.is_sharded:
        for number in range(2):
            model(run.data(3, 4, of=number)).square().mean()
    one(run, model)


# -- changes between steps ---------------------------------------------------------------------------------------------


def in_place(model: nn.Module, number: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def new_data(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.detach() * 0.9


def loads(*, assign: bool) -> Callable[[nn.Module, int], None]:
    def change(model: nn.Module, number: int) -> None:
        if number == 1:
            state = {name: (value * 0.9).detach() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=assign)

    return change


def to_float32_and_back(model: nn.Module, number: int) -> None:
    model.to("cpu").float()
    model.double()


def unfreezes(model: Any, number: int) -> None:
    model.blocks[number % 3].requires_grad_(number % 2 == 1)


def evaluates(model: Any, number: int) -> None:
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
        model.train()


def forgets_a_forward(model: Any, number: int) -> None:
    """A forward with a graph, alive while the optimizer steps."""
    model.kept_loss = [model(torch.ones(2, 4)).sum()] if number == 0 else []


def drops_a_forward(run: Run, model: Any) -> None:
    model.kept_loss = []
    one(run, model)


def frozen_between(run: Run, model: Any) -> None:
    """Frozen between a forward and its backward: in one process the gradient comes all the same."""
    loss = model(run.data(3, 4)).square().mean()
    model.blocks[1].requires_grad_(False)
    run.backward(loss)
    model.blocks[1].requires_grad_(True)


def frozen_over_the_step(run: Run, model: Any) -> None:
    model.blocks[1].requires_grad_(True)
    loss = model(run.data(3, 4)).square().mean()
    model.blocks[1].requires_grad_(False)
    run.backward(loss)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies(run: Run, model: Any) -> None:
    """Copies that are shards again, an average of the weights, and what they say of their names."""
    if run.is_sharded:
        with torch.no_grad():
            average = [parameter.detach().clone() for parameter in model.parameters()]
            for kept, parameter in zip(average, model.parameters(), strict=True):
                kept.lerp_(parameter, 0.1)
        copied = copy.deepcopy(model)
        assert [name for name, _ in copied.named_parameters()] == [name for name, _ in model.named_parameters()]
        assert not {id(p) for p in copied.parameters()} & {id(p) for p in model.parameters()}
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        for name, value in model.state_dict().items():
            assert torch.equal(loaded[name].to_local(), value.to_local()), name
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
    one(run, model)


# -- calls that are not easy -------------------------------------------------------------------------------------------


def by_functional_call(run: Run, model: Any) -> None:
    if run.is_sharded:
        run.backward(model(run.data(3, 4)).square().mean())
    else:
        run.backward(functional_call(model, dict(model.named_parameters()), (run.data(3, 4),)).square().mean())


def under_autocast(run: Run, model: nn.Module) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(run.data(3, 4)).double().square().mean()
    run.backward(loss)


def gradients_of_outputs(run: Run, model: nn.Module) -> None:
    """Two losses with one graph, each with a pass of its own, the second over a part."""
    hidden = model.first(run.data(3, WIDTH))  # type: ignore[operator]
    output = model.second(hidden)  # type: ignore[operator]
    output.square().mean().backward(retain_graph=True)
    run.backward(hidden.abs().mean())


def by_autograd_grad(run: Run, model: nn.Module) -> None:
    """`torch.autograd.grad` to an activation first, then backward of the rest."""
    hidden = model.first(run.data(3, WIDTH))  # type: ignore[operator]
    leaf = hidden.detach().requires_grad_()
    loss = model.second(leaf).square().mean()  # type: ignore[operator]
    run.losses.append(loss.item())
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    loss.backward()
    hidden.backward(grad)


def two_layers() -> nn.Module:
    return Of(lambda self, x: self.second(self.first(x)), first=Block(), second=nn.Linear(WIDTH, 3))


def normalised() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        torch.nn.utils.parametrizations.weight_norm(block.up)
    return model


def keeps_a_weight() -> nn.Module:
    """A unit whose output is a weight itself, which a unit behind it uses."""
    return Of(
        lambda self, x: x @ self.first(x).T + self.second(x),
        first=Of(lambda self, x: self.weight * 1, weight=nn.Parameter(torch.randn(WIDTH, WIDTH))),
        second=nn.Linear(WIDTH, WIDTH),
    )


ERRORS = {
    f"{error.__name__} in {place}": Program(Stack, blocks_and_all, fails_first(one, error, place))
    for error in (ValueError, KeyboardInterrupt)
    for place in ("blocks.1:forward", "blocks.1.up:forward", "blocks.1.up:backward", "last:backward", "first:backward")
}
PROGRAMS = {
    **ERRORS,
    "KeyboardInterrupt with a tied weight": Program(
        tied_across, children_and_all, fails_first(tokens, KeyboardInterrupt, "block.up:forward")
    ),
    "KeyboardInterrupt in a unit that borrows": Program(
        tied_within, children_and_all, fails_first(of_width, KeyboardInterrupt, "two:backward")
    ),
    "Ctrl-C while it evaluates": Program(Stack, blocks_and_all, fails_while_it_evaluates),
    "graphs that are dropped": Program(Stack, blocks_and_all, abandoned_graph),
    "written in place": Program(Stack, blocks_and_all, one, in_place),
    "data that are replaced": Program(Stack, blocks_and_all, one, new_data),
    "loaded": Program(Stack, blocks_and_all, one, loads(assign=False)),
    "loaded by assignment": Program(Stack, blocks_and_all, one, loads(assign=True)),
    "to float32 and back": Program(Stack, blocks_and_all, one, to_float32_and_back),
    "frozen and trained again": Program(Stack, blocks_and_all, one, unfreezes),
    "an evaluation before the optimizer": Program(Stack, blocks_and_all, one, evaluates),
    "a graph over the optimizer's step": Program(Stack, blocks_and_all, drops_a_forward, forgets_a_forward),
    "frozen between forward and backward": Program(Stack, blocks_and_all, frozen_between),
    "frozen before backward until the next step": Program(Stack, blocks_and_all, frozen_over_the_step),
    "copies": Program(Stack, blocks_and_all, copies),
    "functional_call on the whole": Program(Stack, blocks_and_all, by_functional_call),
    "autocast": Program(Stack, blocks_and_all, under_autocast, largest=1e-3),
    "two passes over one graph": Program(two_layers, children_and_all, gradients_of_outputs),
    "autograd.grad first": Program(two_layers, lambda m: list(m.children()), by_autograd_grad),
    "parametrizations": Program(normalised, blocks_and_all, one),
    "an output that is a weight": Program(keeps_a_weight, children_and_all, of_width),
}
