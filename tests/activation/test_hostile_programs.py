"""Programs that break those who swap today: each gives the plain gradients, bit for bit, or a clear error."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu, offload_wrapper, swap_wrapper
from support.region_programs import flush_aborted_backward
from support.swapping import Swapping, check_nothing_left, gradients
from support.training import Block, make_model, same, train


def wrapped(model: nn.Sequential, **options: Any) -> nn.Sequential:
    return nn.Sequential(*(swap_wrapper(block, **options) for block in model))


def test_wrapped_blocks_give_the_plain_gradients_and_really_move_bytes(swapping: Swapping) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    managed = wrapped(model)
    for _ in range(4):
        assert same(train(managed, x), plain)
    assert swapping.offloaded_bytes > 0
    assert swapping.loaded_bytes > 0


def test_offload_wrapper_is_the_simplest_form(swapping: Swapping) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    assert same(train(nn.Sequential(*(offload_wrapper(block) for block in model)), x), plain)
    assert swapping.offloaded_bytes > 0


def test_bytes_moved_are_the_unique_storage_bytes(swapping: Swapping) -> None:
    """Rule 1: views of one storage, however many, move once."""
    base = swapping.randn(64, 64)

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y[::2].exp() * y[1::2] + y.t()[::2, :].sin() * y.expand(2, 64, 64)[1][::2]).sum()

    def managed(x: torch.Tensor) -> torch.Tensor:
        with AsyncSaveOnCpu():
            return plain(x)

    assert same(gradients(managed, base), gradients(plain, base))
    # y, of which four views are saved, and the results of exp and sin
    assert swapping.offloaded_bytes == 64 * 64 * 4 + 2 * 32 * 64 * 4


def test_parameters_buffers_and_views_of_them_are_never_swapped(swapping: Swapping) -> None:
    """Rule 3: `nn.Linear` saves `weight.t()`, which is no Parameter."""
    layer = nn.Linear(64, 64, bias=False).to(swapping.kind)
    managed = swap_wrapper(layer)
    x = swapping.randn(2, 64)
    managed(x.requires_grad_()).sum().backward()
    assert swapping.offloaded_bytes == 2 * 64 * 4, "the input and nothing else"


def test_a_weight_cast_by_autocast_is_not_swapped(swapping: Swapping) -> None:
    layer = nn.Linear(64, 64, bias=False).to(swapping.kind)
    managed = swap_wrapper(layer)
    x = swapping.randn(2, 64, requires_grad=True)
    with torch.autocast(swapping.kind, torch.float16 if swapping.kind == "cuda" else torch.bfloat16):
        out = managed(x)
    out.float().sum().backward()
    assert 0 < swapping.offloaded_bytes <= 2 * 64 * 4
    assert layer.weight.grad is not None


def test_a_residual_changed_in_place_is_an_error_that_names_it(swapping: Swapping) -> None:
    """Rule 4: under saved-tensor hooks PyTorch itself is silent and doubles the gradient."""
    x = swapping.randn(64, 64, requires_grad=True)
    with swapping.configured(window_bytes="1MiB"):
        with AsyncSaveOnCpu(name="my block"):
            y = x.exp()
            y.mul_(2)
        with pytest.raises(
            RuntimeError, match=r"(?s)changed in place.*xpected version 0, got version 1.*my block.*Exp"
        ):
            y.sum().backward()
    del y


def test_a_kept_residual_changed_in_place_is_an_error_too(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    with AsyncSaveOnCpu(policy_fn=lambda tensor: True):
        y = x.exp()
        y.mul_(2)
    with pytest.raises(RuntimeError, match="(?s)changed in place.*version"):
        y.sum().backward()
    assert swapping.offloaded_bytes == 0


def test_a_change_after_the_copy_is_done_is_harmless(swapping: Swapping) -> None:
    from hyper_parallel.core.swap import engines

    x = swapping.randn(64, 64, requires_grad=True)
    with AsyncSaveOnCpu():
        y = x.exp()
    expected = y.detach().clone()
    for managed in engines.all_engines().values():
        managed.engine.join()
    y.detach().zero_()
    (y * 0 + y.detach() * 0).sum()
    torch.autograd.backward([y], [torch.ones_like(y)])
    assert torch.equal(x.grad, expected)


def test_a_slice_of_a_held_base_leaves_the_base_unchanged(swapping: Swapping) -> None:
    """Rule 2: a user's tensor is never freed or written."""
    base = swapping.randn(64, 64)
    before = base.clone()
    leaf = base[8:24].detach().requires_grad_()
    with AsyncSaveOnCpu():
        loss = (leaf * leaf).sum()
    assert torch.equal(base, before)
    loss.backward()
    assert torch.equal(base, before)
    assert torch.equal(leaf.grad, 2 * before[8:24])


def test_the_users_input_can_be_read_between_forward_and_backward(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    with AsyncSaveOnCpu():
        loss = (x * x).exp().sum()
    total = x.detach().double().sum()
    loss.backward()
    assert torch.equal(x.detach().double().sum(), total)
    assert torch.equal(x.grad, gradients(lambda y: (y * y).exp().sum(), x)[0])


def test_an_abandoned_forward_and_a_retry(swapping: Swapping) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    managed = wrapped(model)
    out = managed(x)
    del out
    assert same(train(managed, x), plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_the_middle_leaves_nothing_and_the_next_step_is_right(swapping: Swapping, where: str) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if where == "forward":
                raise KeyError("mine")
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    managed = wrapped(model)

    def fail() -> None:
        h = managed[0](x.detach().requires_grad_())
        managed[2](Failing.apply(managed[1](h))).sum().backward()

    with pytest.raises(KeyError, match="mine"):
        fail()
    flush_aborted_backward()
    gc.collect()
    check_nothing_left()
    assert same(train(managed, x), plain)


def test_retain_graph_twice_and_a_third_time(swapping: Swapping) -> None:
    model, x = make_model(swapping, 2), swapping.randn(4, 16, 32)
    managed = wrapped(model)

    def backward_three_times(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert same(backward_three_times(managed), backward_three_times(model))


def test_double_backward(swapping: Swapping) -> None:
    def second(loss: Any) -> list[torch.Tensor]:
        x = swapping.randn(16, 16, requires_grad=True)
        (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
        grad.square().sum().backward()
        return [grad.detach(), x.grad]

    def plain(x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.t()).tanh().exp() * x).sum()

    def managed(x: torch.Tensor) -> torch.Tensor:
        with AsyncSaveOnCpu():
            return plain(x)

    assert same(second(managed), second(plain))
    assert swapping.offloaded_bytes > 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_and_between_steps(swapping: Swapping, context: Any) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    managed = wrapped(model)
    for _ in range(2):
        with context():
            managed(x)
        assert same(train(managed, x), plain)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_forwards_then_two_backwards_in_either_order(swapping: Swapping, order: tuple[int, int]) -> None:
    """Rule 11: every state belongs to one forward."""
    model = make_model(swapping)

    def run(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        inputs = [swapping.randn(4, 16, 32, seed=s, requires_grad=True) for s in (3, 4)]
        losses = [model(x).square().mean() for x in inputs]
        for index in order:
            losses[index].backward()
        return [*(x.grad for x in inputs), *(p.grad.clone() for p in model.parameters())]

    assert same(run(wrapped(model)), run(model))


def test_the_same_module_called_twice_in_a_forward(swapping: Swapping) -> None:
    block, x = Block().to(swapping.kind), swapping.randn(4, 16, 32)
    managed = swap_wrapper(block)

    class Twice(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    assert same(train(Twice(managed), x), train(Twice(block), x))


def test_tied_weights(swapping: Swapping) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 32)
            self.block = Block()
            self.head = nn.Linear(32, 50, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.embedding(ids)))

    torch.manual_seed(0)
    model = Tied().to(swapping.kind)
    ids = torch.arange(40, device=swapping.kind).reshape(2, 20) % 50

    def run(model: nn.Module) -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        model(ids).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    assert same(run(swap_wrapper(model)), run(model))


def test_backward_in_another_thread(swapping: Swapping) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    plain = train(model, x)
    managed = wrapped(model)
    managed.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    leaf = x.detach().clone().requires_grad_()
    loss = managed(leaf).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert same([leaf.grad, *(p.grad for p in managed.parameters())], plain)


def test_ten_threads_train_ten_models(swapping: Swapping) -> None:
    """Reliability: threads, several models."""
    failures: list[Any] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(32, 32, generator=generator).to(swapping.kind)
        for step in range(20):
            x = swapping.randn(16, 32, seed=seed * 100 + step)

            def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return ((x @ weight).tanh() @ weight.t()).exp().mean()

            def managed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                with AsyncSaveOnCpu(name=f"thread {seed}"):
                    return plain(x, weight)

            if not same(gradients(managed, x, weight), gradients(plain, x, weight)):
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []
    assert swapping.offloaded_bytes > 0


def test_a_policy_chooses_per_tensor(swapping: Swapping) -> None:
    from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy

    x = swapping.randn(64, 64, requires_grad=True)
    seen: list[tuple[int, ...]] = []

    def policy(tensor: torch.Tensor) -> CheckpointPolicy:
        seen.append(tuple(tensor.shape))
        return CheckpointPolicy.MUST_SWAP if len(seen) == 1 else CheckpointPolicy.MUST_SAVE

    with AsyncSaveOnCpu(policy):
        loss = (x.exp() * x.sin()).sum()
    assert swapping.offloaded_bytes == 64 * 64 * 4
    loss.backward()
    assert torch.equal(x.grad, gradients(lambda y: (y.exp() * y.sin()).sum(), x)[0])


@pytest.mark.parametrize("answer", [None, "swap", 7, object])
def test_a_policy_with_a_wrong_answer_is_an_error_that_shows_it(swapping: Swapping, answer: Any) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    with pytest.raises(TypeError, match="(?s)CheckpointPolicy.*got"), AsyncSaveOnCpu(lambda tensor: answer):
        x.exp()
    assert swapping.offloaded_bytes == 0


def test_pytorchs_own_policies_are_understood() -> None:
    from torch.utils.checkpoint import CheckpointPolicy as TorchPolicy

    from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy, as_policy, keeps_tensor

    for member in TorchPolicy:
        expected = CheckpointPolicy.MUST_SWAP if "OFFLOAD" in member.name else CheckpointPolicy[member.name]
        assert as_policy(member) is expected
    assert keeps_tensor(True)
    assert not keeps_tensor(False)


def test_a_function_that_returns_its_saved_tensor_as_gradient(swapping: Swapping) -> None:
    class Echo(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return ctx.saved_tensors[0]

    for step in range(20):
        x = swapping.randn(64, 64, seed=step, requires_grad=True)
        with AsyncSaveOnCpu():
            loss = Echo.apply(x * 1.5).sum()
        loss.backward()
        noise = [torch.full((64, 64), float(i), device=swapping.kind) for i in range(8)]
        assert torch.equal(x.grad, (x.detach() * 1.5) * 1.5), f"step {step}, {len(noise)}"


def test_saved_tensors_asked_for_twice_in_one_backward(swapping: Swapping) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (first,) = ctx.saved_tensors
            (second,) = ctx.saved_tensors
            return grad * (first + second)

    x = swapping.randn(64, 64, requires_grad=True)
    with AsyncSaveOnCpu():
        loss = Twice.apply(x * 1.5).sum()
    loss.backward()
    assert torch.equal(x.grad, (x.detach() * 1.5 + x.detach() * 1.5) * 1.5)


def test_bytes_at_the_last_step_are_those_of_the_third_with_the_collector_off(swapping: Swapping) -> None:
    model, x = make_model(swapping), swapping.randn(4, 16, 32)
    managed = wrapped(model)
    gc.collect()
    gc.disable()
    try:
        tensors = []
        for _ in range(40):
            train(managed, x)
            check_nothing_left()
            tensors.append(sum(issubclass(type(obj), torch.Tensor) for obj in gc.get_objects()))
    finally:
        gc.enable()
    assert tensors[2] == tensors[-1]


def test_nothing_is_swapped_from_the_cpu_without_a_directory() -> None:
    """Rule 14: on a tensor that lives on the CPU a host swap is a no-op."""
    from hyper_parallel.core.swap import engines

    before = engines.total_stats().offloaded_bytes
    x = torch.randn(256, 256, requires_grad=True)
    with AsyncSaveOnCpu():
        loss = x.exp().sum()
    loss.backward()
    assert torch.equal(x.grad, x.detach().exp())
    assert engines.total_stats().offloaded_bytes == before
