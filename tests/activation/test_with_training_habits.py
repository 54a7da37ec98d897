"""What training loops do besides one step after the other: each as with plain blocks, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.activation_checkpoint import CheckpointImpl, checkpoint_wrapper
from support.swapping import Swapping
from support.training import Block
from support.wrapped import Wrap, blocks, gradients_of, loss_of, numbers_of, steps

pytestmark = pytest.mark.usefixtures("one_thread")


# -- accumulating and looking in between ---------------------------------------------------------------------------------------


def test_gradients_of_several_batches_are_accumulated(check: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(2):
            for part in range(3):
                (loss_of(model, swapping, 3 * step + part) / 3).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
        return numbers_of(model)

    check(program)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_forward_and_backward_and_between_steps(check: Any, context: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model, found = blocks(wrap, swapping), []
        for number in range(3):
            loss = loss_of(model, swapping, number)
            with context():
                model.eval()
                found.append(loss_of(model, swapping, 7).clone())
                model.train()
            loss.backward()
        return found + gradients_of(model)

    check(program)


def test_a_copy_that_averages_the_weights_is_evaluated_beside(check: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping)
        average = torch.optim.swa_utils.AveragedModel(model)
        found = []
        for number in range(2):
            loss_of(model, swapping, number).backward()
            torch.optim.SGD(model.parameters(), lr=0.01).step()
            average.update_parameters(model)
            with torch.no_grad():
                found.append(loss_of(average, swapping, 5))
        return found + numbers_of(average)

    check(program)


# -- what is trained -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["first block", "all but the last", "every other parameter", "unfrozen later"])
def test_frozen_parameters(check: Any, frozen: str) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping)
        for index, (name, parameter) in enumerate(model.named_parameters()):
            block = int(name.partition(".")[0])
            is_frozen = {"first block": block == 0, "all but the last": block < 2}.get(frozen, index % 2 == 0)
            parameter.requires_grad_(not is_frozen)
        found = steps(model, swapping, 2)
        if frozen == "unfrozen later":
            model.requires_grad_(True)
            found += steps(model, swapping, 2)
        return found

    check(program)


class Adapted(nn.Module):
    """A frozen layer and a trained correction of low rank, as LoRA has it."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(self.dropout(x))) * 0.5


def adapted_block() -> nn.Module:
    block = Block().requires_grad_(False)
    block.qkv, block.out = Adapted(block.qkv), Adapted(block.out)
    return block


def test_adapters_of_low_rank_in_a_frozen_model_whose_first_input_needs_no_gradient(check: Any) -> None:
    """PyTorch's reentrant checkpoint gives no gradient there."""

    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping, adapted_block)
        found = steps(model, swapping)
        trained = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert len(trained) == 3 * 4
        assert all("down" in name or "up" in name for name in trained)
        return found

    check(program)


class Tied(nn.Module):
    """The embedding is the head, too; the blocks between are wrapped, or all of it."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(*(wrap(Block()) for _ in range(2)))
        self.head = wrap(nn.Linear(32, 50, bias=False))
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding((x[..., 0] * 100).abs().long() % 50)))


@pytest.mark.parametrize("around", ["each block", "all of it"])
def test_tied_embeddings(check: Any, around: str) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Tied(wrap) if around == "each block" else wrap(Tied(lambda block: block))
        return steps(model.to(swapping.kind), swapping)

    check(program)


# -- hooks -----------------------------------------------------------------------------------------------------------------------


def test_an_optimizer_that_steps_inside_backward(check: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model = blocks(wrap, swapping)
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05) for parameter in model.parameters()}

        def step(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(3):
            loss_of(model, swapping, number).backward()
        return numbers_of(model)

    check(program)


def test_hooks_of_modules_see_and_change_what_they_do_in_plain_blocks(check: Any) -> None:
    def program(wrap: Wrap, swapping: Swapping) -> list[torch.Tensor]:
        model, seen = blocks(wrap, swapping), []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, out: out * 1.1)
                module.register_full_backward_pre_hook(lambda module, grads: tuple(grad * 0.5 for grad in grads))
                module.register_full_backward_hook(lambda module, into, out: seen.append(into[0].clone()))
        found = steps(model, swapping, 2)
        assert len(seen) == 2 * 6
        return found + seen

    check(program)


@pytest.mark.parametrize(
    "wrap",
    [checkpoint_wrapper, functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)],
    ids=["ours", "reentrant"],
)
def test_batch_norm_counts_each_forward_once_unless_pytorchs_reentrant_form_is_asked_for(wrap: Wrap) -> None:
    model = wrap(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    for _ in range(2):
        model(torch.ones(4, 8, requires_grad=True) * torch.arange(4.0)[:, None]).square().sum().backward()
    is_reentrant = isinstance(wrap, functools.partial)
    assert int(model[1].num_batches_tracked) == (4 if is_reentrant else 2)
