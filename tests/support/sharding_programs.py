"""Models that are not easy to shard: used twice, in pieces, partly, tied, frozen, with hooks of users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from support.sharding import WIDTH, Of, Program, Run


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, and parameters of its own before and behind them."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def blocks_and_all(model: Any) -> list[nn.Module]:
    return [*model.blocks, model]


def children_and_all(model: nn.Module) -> list[nn.Module]:
    return [*model.children(), model]


def children(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


def one(run: Run, model: nn.Module) -> None:
    run.backward(model(run.data(3, 4)).square().mean())


def of_width(run: Run, model: nn.Module) -> None:
    run.backward(model(run.data(3, WIDTH)).square().mean())


def embedding_model() -> nn.Module:
    return Of(
        lambda self, tokens: self.head(self.block(self.embedding(tokens))),
        embedding=nn.Embedding(11, WIDTH),
        block=Block(),
        head=nn.Linear(WIDTH, 11),
    )


def tokens(run: Run, model: nn.Module) -> None:
    ids = run.integers(11, 2, 4)
    logits = model(ids)
    run.backward(nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()))


# -- forwards and backwards that do not alternate ----------------------------------------------------------------------


def body_and_head() -> nn.Module:
    return Of(lambda self, x: self.head(self.body(x)), body=Block(), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 3))


def chunked(run: Run, model: Any) -> None:
    """The loss in three pieces, each with a backward of its own, and then the body's."""
    hidden = model.norm(model.body(run.data(6, WIDTH)))
    leaf = hidden.detach().requires_grad_()
    for piece in leaf.chunk(3):
        run.backward(model.head(piece).square().mean())
    hidden.backward(leaf.grad)


def chunked_in_a_step(run: Run, model: Any) -> None:
    with run.microbatch(model, last=True):
        chunked(run, model)


def used_again(run: Run, model: Any) -> None:
    hidden = model.head(model.norm(model.body(run.data(3, WIDTH))))
    again = model.head(torch.tanh(model.body(run.data(2, WIDTH, of=1))))
    run.backward(hidden.square().mean() + again.abs().mean())


def forwards(*backwards: int, num: int) -> Any:
    """Forwards of the same model, of which some get a backward, in this order."""

    def step(run: Run, model: nn.Module) -> None:
        losses = [model(run.data(3, 4, of=of)).square().mean() for of in range(num)]
        order = backwards if run.number == 0 else range(num)  # a graph that is dropped leaves a unit whole with zero=2
        for number in order:
            run.backward(losses[number])

    return step


def no_grad_between(run: Run, model: Any) -> None:
    loss = model(run.data(3, 4)).square().mean()
    with torch.no_grad():
        model(run.data(3, 4, of=1))
        model.blocks[1](run.data(3, WIDTH, of=2))
    run.backward(loss)


def no_grad_inside(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = self.body(x)
    return self.head(self.body(x) - target / 2)


def inference_between(run: Run, model: Any) -> None:
    with torch.inference_mode():
        model(run.data(3, 4, of=1))
    one(run, model)
    with torch.inference_mode():
        model(run.data(3, 4, of=1))


def graph_kept(run: Run, model: nn.Module) -> None:
    loss = model(run.data(3, 4)).square().mean()
    loss.backward(retain_graph=True)
    run.backward(loss)


def in_parts(run: Run, model: Any) -> None:
    """Backward comes to the units of one graph in two passes."""
    x = model.first(run.data(3, 4)) if not isinstance(model, Stack) else None
    assert x is None
    outputs = [model(run.data(3, 4, of=of)) for of in range(2)]
    (outputs[0].square().mean() * outputs[1].detach().mean()).backward()
    run.backward(outputs[1].square().mean())


def twice_in_one_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.body(torch.tanh(self.body(x))) + self.body(x))


def recursive(self: Any, x: torch.Tensor, depth: int = 3) -> torch.Tensor:
    return x if depth == 0 else self(torch.tanh(self.inner(x)), depth - 1) + self.inner(x)


# -- parameters that are used by some ----------------------------------------------------------------------------------


def some_of_four(self: Any, x: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
    for number in which:
        x = torch.tanh(getattr(self, f"part{number}")(x))
    return x


def four_parts() -> nn.Module:
    return Of(some_of_four, **{f"part{number}": nn.Linear(WIDTH, WIDTH) for number in range(4)})


def used_on_some_ranks(run: Run, model: nn.Module) -> None:
    # Unit 3 is used by nobody; rank 0 has not 0, rank 1 has not 1. All ranks call all units that any calls.
    run.backward(model(run.data(3, WIDTH), [0, 1, 2]).square().mean())


def experts(self: Any, x: torch.Tensor, mine: int) -> torch.Tensor:
    """Of some layers of one unit each rank uses its own; the third is used by nobody."""
    return self.layers[mine % 2](x) + self.last(x)


def experts_model() -> nn.Module:
    return Of(experts, layers=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), last=nn.Linear(WIDTH, WIDTH))


def own_expert(run: Run, model: nn.Module) -> None:
    run.backward(model(run.data(3, WIDTH), run.rank).square().mean())


def first_used_in_the_third(run: Run, model: nn.Module) -> None:
    for number in range(4):
        with run.microbatch(model, last=number == 3):
            which = [0, 1, 2] if number == 2 else [0, 1]
            run.backward(model(run.data(3, WIDTH, of=number), which).square().mean())


def last_uses_little(run: Run, model: nn.Module) -> None:
    for number in range(3):
        with run.microbatch(model, last=number == 2):
            which = [0, 1, 2] if number < 2 else [1]
            run.backward(model(run.data(3, WIDTH, of=number), which).square().mean())


def only_rank_0_has_a_gradient(run: Run, model: nn.Module) -> None:
    output = model(run.data(3, WIDTH))
    run.backward(output.square().mean() if run.rank == 0 else (output * 0.5).sum())


# -- tied, frozen ------------------------------------------------------------------------------------------------------


def tied_within() -> nn.Module:
    model = Of(
        lambda self, x: self.two(torch.tanh(self.one(x))), one=nn.Linear(WIDTH, WIDTH), two=nn.Linear(WIDTH, WIDTH)
    )
    model.two.weight = model.one.weight
    return model


def tied_across() -> nn.Module:
    """The embedding's weight is the head's, 11 rows, in two units; a block stands between them."""
    model = embedding_model()
    model.head.weight = model.embedding.weight
    return model


def one_module_in_two_parents() -> nn.Module:
    inner = nn.Linear(WIDTH, WIDTH)
    return Of(
        lambda self, x: self.right(self.left(x)),
        left=Of(lambda self, x: torch.tanh(self.inner(x)), inner=inner),
        right=Of(lambda self, x: self.inner(x) + x, inner=inner),
    )


def frozen(*names: str) -> Any:
    def make() -> nn.Module:
        model = Stack()
        for name in names:
            model.get_submodule(name).requires_grad_(False)
        return model

    return make


def toggles(model: Any, number: int) -> None:
    """Freeze another block after each step."""
    for index, block in enumerate(model.blocks):
        block.requires_grad_(index != number)


def lora() -> nn.Module:
    model = Stack()
    model.requires_grad_(False)
    for block in model.blocks:
        block.up.bias.requires_grad_(True)
    return model


# -- hooks of users ----------------------------------------------------------------------------------------------------


def with_user_hooks() -> nn.Module:
    model = Stack()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        block.register_forward_hook(lambda module, args, output: output * module.norm.weight.sum())
        block.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2,))
    return model


def input_gradient_only(run: Run, model: nn.Module) -> None:
    x = run.data(3, 4).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().mean(), x)
    run.losses.append(float(grad.sum()))
    one(run, model)


PROGRAMS: dict[str, Program] = {
    "blocks and a model": Program(Stack, blocks_and_all, one),
    "one unit": Program(Stack, lambda model: [model], one),
    "every layer": Program(Stack, lambda model: [m for m in model.modules() if not list(m.children())], one),
    "several modules as one unit": Program(Stack, lambda model: [[*model.blocks], model], one),
    "chunked loss": Program(body_and_head, children, chunked),
    "chunked loss in one step": Program(body_and_head, children, chunked_in_a_step),
    "chunked loss, units of two modules": Program(body_and_head, lambda m: [m.body, [m.norm, m.head]], chunked),
    "a module of a group that is used again": Program(body_and_head, lambda m: [m.body, [m.norm, m.head]], used_again),
    "two forwards, backwards in order": Program(Stack, blocks_and_all, forwards(0, 1, num=2)),
    "two forwards, backwards in the other order": Program(Stack, blocks_and_all, forwards(1, 0, num=2)),
    "three forwards, one without a backward": Program(Stack, blocks_and_all, forwards(2, 0, num=3)),
    "a call without gradients between": Program(Stack, blocks_and_all, no_grad_between),
    "a call without gradients inside": Program(
        lambda: Of(no_grad_inside, body=Block(), head=nn.Linear(WIDTH, 3)), children_and_all, of_width
    ),
    "inference before and behind": Program(Stack, blocks_and_all, inference_between),
    "a graph that is kept": Program(Stack, blocks_and_all, graph_kept),
    "two graphs": Program(Stack, blocks_and_all, in_parts),
    "a unit three times in one forward": Program(
        lambda: Of(twice_in_one_forward, body=Block(), head=nn.Linear(WIDTH, 3)), children_and_all, of_width
    ),
    "a unit within itself": Program(
        lambda: Of(recursive, inner=nn.Linear(WIDTH, WIDTH)), lambda model: [model], of_width
    ),
    "a unit within itself, inner unit": Program(
        lambda: Of(recursive, inner=nn.Linear(WIDTH, WIDTH)), children_and_all, of_width
    ),
    "unused everywhere": Program(four_parts, children_and_all, used_on_some_ranks),
    "unused on some ranks": Program(experts_model, lambda model: [model], own_expert),
    "first used in the third microbatch": Program(four_parts, children_and_all, first_used_in_the_third),
    "hardly used in the last microbatch": Program(four_parts, children_and_all, last_uses_little),
    "tied within a unit": Program(tied_within, lambda model: [model], of_width),
    "tied across units": Program(tied_within, children_and_all, of_width),
    "tied embedding": Program(tied_across, children_and_all, tokens),
    "tied embedding, no unit around": Program(tied_across, children, tokens),
    "tied embedding, all in one": Program(tied_across, lambda model: [model.block, model], tokens),
    "a module in two parents": Program(one_module_in_two_parents, children_and_all, of_width),
    "frozen block": Program(frozen("blocks.1"), blocks_and_all, one),
    "frozen first parts": Program(frozen("first", "blocks.0", "blocks.1"), blocks_and_all, one),
    "frozen last parts": Program(frozen("last", "blocks.2"), blocks_and_all, one),
    "frozen linear of a block": Program(frozen("blocks.1.up"), blocks_and_all, one),
    "biases only": Program(lora, blocks_and_all, one),
    "another block frozen after each step": Program(Stack, blocks_and_all, one, toggles),
    "hooks of users": Program(with_user_hooks, blocks_and_all, one),
    "gradient of an input alone": Program(Stack, blocks_and_all, input_gradient_only),
}
