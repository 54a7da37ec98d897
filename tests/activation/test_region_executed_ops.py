"""Rule 15: a region keeps nothing that backward does not need, and runs nothing again that is kept or that nothing needs.

Kernels are counted by a dispatch mode around everything: a region's own modes are inside, so what they leave out never gets there.
On the CPU, where backward runs in the calling thread and so under the mode.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.swap import engines
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from support.campaign import share
from support.region_programs import Manner, Program, Region, Runner, draw
from support.swapping import Swapping

SIZE = 16
BYTES = SIZE * SIZE * 4
# They make a tensor and compute nothing; views are the others.
WITHOUT_KERNEL = {
    "aten.empty.memory_format",
    "aten.set_.source_Storage",
    "aten.set_.source_Storage_storage_offset",
    "aten.lift_fresh.default",
    "aten._unsafe_view.default",
    "aten._reshape_alias.default",
}


class Executed(TorchDispatchMode):
    """Counts kernels by name, and knows which results still live."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.results: list[tuple[str, StorageWeakRef]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view or str(func) in WITHOUT_KERNEL:
            return result
        self.counts[str(func)] += 1
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.results.append((str(func), StorageWeakRef(tensor.untyped_storage())))
        return result

    def living(self) -> set[str]:
        """Ops of which a result lives."""
        for managed in engines.all_engines().values():
            managed.engine.join()  # a copy under way holds its source
        return {name.split(".")[1] for name, ref in self.results if not ref.expired()}


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What nobody needs must die by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def answer(default: CheckpointPolicy, **named: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    """A policy by name of op."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return named.get(str(op).split(".")[1], default)

    return policy


SAVE, SWAP, RECOMPUTE = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP, CheckpointPolicy.MUST_RECOMPUTE


def leaf(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def count(function: Callable[..., Any], inputs: list[torch.Tensor]) -> tuple[Counter[str], Counter[str]]:
    """Kernels of forward and of backward."""
    with Executed() as forward:
        loss = function(*inputs).sum()
    with Executed() as backward:
        loss.backward()
    return forward.counts, backward.counts


def recomputed(function: Callable[..., Any], num_inputs: int = 1, **options: Any) -> Counter[str]:
    """Kernels that backward runs because of the region. Checks that forward runs what it runs without."""
    plain_forward, plain_backward = count(function, [leaf(seed) for seed in range(num_inputs)])
    forward, backward = count(
        lambda *inputs: checkpoint(function, *inputs, **options), [leaf(seed) for seed in range(num_inputs)]
    )
    assert forward == plain_forward
    assert plain_backward - backward == Counter(), "backward itself ran less than without a region"
    return backward - plain_backward


def names(counts: Counter[str]) -> dict[str, int]:
    return {name.split(".")[1]: number for name, number in counts.items()}


# -- what is run again --------------------------------------------------------------------------------------------------------


def chain(x: torch.Tensor) -> torch.Tensor:
    """Autograd keeps x, the result of exp and the result of tanh."""
    return x.sin().exp().tanh()


def test_the_mode_outside_sees_each_kernel_of_a_plain_call_once() -> None:
    forward, _ = count(chain, [leaf()])
    assert names(forward) == {"sin": 1, "exp": 1, "tanh": 1, "sum": 1}


def test_without_a_policy_every_needed_op_runs_again_once(on_disk: Swapping) -> None:
    assert names(recomputed(chain)) == {"sin": 1, "exp": 1, "tanh": 1}


def test_an_op_whose_result_nothing_needs_does_not_run_again(on_disk: Swapping) -> None:
    """The matrix product at the end of a block: autograd keeps its inputs, not its result."""
    assert names(recomputed(lambda x, w: x.sin() @ w, 2)) == {"sin": 1}


@pytest.mark.parametrize("kept", [SAVE, SWAP])
def test_an_op_whose_result_is_kept_does_not_run_again(on_disk: Swapping, kept: CheckpointPolicy) -> None:
    assert names(recomputed(chain, policy_fn=answer(RECOMPUTE, tanh=kept))) == {"sin": 1, "exp": 1}


@pytest.mark.parametrize("kept", [SAVE, SWAP])
def test_an_op_that_feeds_only_kept_ones_does_not_run_again(on_disk: Swapping, kept: CheckpointPolicy) -> None:
    assert names(recomputed(chain, policy_fn=answer(RECOMPUTE, exp=kept))) == {"tanh": 1}


@pytest.mark.parametrize("kept", [SAVE, SWAP])
def test_when_everything_is_kept_nothing_runs_again(on_disk: Swapping, kept: CheckpointPolicy) -> None:
    assert recomputed(chain, policy_fn=answer(kept)) == Counter()


def test_a_kept_value_that_only_recomputation_reads_is_used(on_disk: Swapping) -> None:
    """`x.sin() + 1` is no residual, and the way from it to what is one is shorter than from the input."""
    policy = answer(RECOMPUTE, add=SAVE)
    assert names(recomputed(lambda x: (x.sin() + 1).exp(), policy_fn=policy)) == {"exp": 1}


def test_a_branch_without_gradient_does_not_run_again(on_disk: Swapping) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x.cos().exp()
        return x.sin().exp()

    assert names(recomputed(function)) == {"sin": 1, "exp": 1}


def test_an_op_on_the_way_to_a_number_does_not_run_again(on_disk: Swapping) -> None:
    """What left the tensors in forward (`item`) is given again."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().exp() * (2.0 if x.cos().sum().item() > 1e9 else 0.5)

    again = names(recomputed(function))
    assert again == {"sin": 1, "exp": 1}


def test_a_random_op_that_is_saved_does_not_draw_again(on_disk: Swapping) -> None:
    again = names(
        recomputed(lambda x: (x * torch.rand_like(x)).sin().exp(), policy_fn=answer(RECOMPUTE, rand_like=SAVE))
    )
    assert again == {"mul": 1, "sin": 1, "exp": 1}


def test_a_block_runs_its_ops_again_but_the_last(on_disk: Swapping) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, SIZE))
    for parameter in block.parameters():
        parameter.requires_grad_(False)
    for parameter in (block[0].weight, block[0].bias):
        parameter.grad = torch.zeros_like(parameter)  # adding to it is part of both runs
    assert names(recomputed(block)) == {"native_layer_norm": 1, "addmm": 1}, "gelu's result feeds a frozen weight only"
    for parameter in block.parameters():
        parameter.requires_grad_()
        parameter.grad = torch.zeros_like(parameter)
    assert names(recomputed(block)) == {"native_layer_norm": 1, "addmm": 1, "gelu": 1}


# -- when it ends ---------------------------------------------------------------------------------------------------------------


class Marked:
    """Notes how far the function came at each call."""

    def __init__(self) -> None:
        self.reached: list[str] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.reached.append("begin")
        h = x.sin().exp()
        self.reached.append("last residual")
        h = h + 1
        self.reached.append("end")
        return h


def test_recomputation_stops_with_the_last_residual(on_disk: Swapping) -> None:
    """But the first time, which looks at whether anything after that writes what was made again."""
    found = []
    for _ in range(2):
        function = Marked()
        loss = checkpoint(function, leaf()).sum()
        assert function.reached.pop() == "end"
        function.reached.clear()
        loss.backward()
        found.append(function.reached)
    assert found == [["begin", "last residual", "end"], ["begin"]]


def test_recomputation_goes_on_to_the_end_when_it_is_told_so(on_disk: Swapping) -> None:
    function = Marked()
    loss = checkpoint(function, leaf(), early_stop=False).sum()
    function.reached.clear()
    loss.backward()
    assert function.reached == ["begin", "last residual", "end"]


def test_one_backward_recomputes_a_region_once(on_disk: Swapping) -> None:
    num_calls = 0

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nonlocal num_calls
        num_calls += 1
        return x.sin().exp(), x.cos().exp(), x.tanh().exp()

    sum(checkpoint(function, leaf())).sum().backward()
    assert num_calls == 2


def test_a_region_that_backward_does_not_reach_is_not_recomputed(on_disk: Swapping) -> None:
    num_calls = 0

    def function(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return x.sin().exp()

    x, y = leaf(), leaf(1)
    out = checkpoint(function, x) + y
    torch.autograd.grad(out.sum(), y)
    assert num_calls == 1


# -- what is kept -----------------------------------------------------------------------------------------------------------------


def product_at_the_end(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Autograd keeps the result of sin and that of tanh (which is the region's own result); nobody needs that of mm."""
    return (x.sin() @ w).tanh()


def living_after(function: Callable[..., Any], **options: Any) -> set[str]:
    x, w = leaf(), leaf(1)
    with Executed() as executed:
        out = checkpoint(function, x, w, **options)
    living = executed.living()
    out.sum().backward()
    assert len(executed.living()) == 1, "backward is over; the result alone lives"
    return living


def test_without_a_policy_nothing_made_inside_lives_after_the_forward(on_disk: Swapping) -> None:
    assert living_after(product_at_the_end) == {"tanh"}


def test_saving_everything_keeps_what_backward_reads_and_nothing_else(on_disk: Swapping) -> None:
    assert living_after(product_at_the_end, policy_fn=answer(SAVE)) == {"sin", "tanh"}


def test_a_saved_value_that_recomputation_needs_lives_and_one_behind_it_does_not(on_disk: Swapping) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x.cos() + 1) @ w).sin().exp() * w

    living = living_after(function, policy_fn=answer(RECOMPUTE, cos=SAVE, mm=SAVE))
    assert "mm" in living, "sin and exp are recomputed from it"
    # w's gradient needs the input of mm, which is recomputed from the saved cos
    assert living == {"cos", "mm", "mul"}


def test_swapping_everything_leaves_nothing_on_the_device_and_moves_what_backward_reads(on_disk: Swapping) -> None:
    moved = on_disk.offloaded_bytes
    assert living_after(product_at_the_end, policy_fn=answer(SWAP)) == {"tanh"}
    assert on_disk.offloaded_bytes - moved == 2 * BYTES, "the results of sin and of tanh, each once"


def test_views_of_one_storage_are_swapped_once(on_disk: Swapping) -> None:
    """Rule 1."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return (y[::2].exp() * y[1::2] + y.t()[::2, :].sin() * y.expand(2, SIZE, SIZE)[1][::2]).sum()

    moved = on_disk.offloaded_bytes
    checkpoint(function, leaf(), policy_fn=answer(SWAP)).backward()
    assert on_disk.offloaded_bytes - moved == BYTES + 2 * (BYTES // 2), "y, and the results of exp and sin"


def test_swap_inputs_moves_the_inputs_that_are_needed_once(on_disk: Swapping) -> None:
    moved = on_disk.offloaded_bytes
    h = leaf() * 2
    checkpoint(lambda x, y: (x.sin() * y.exp()).tanh(), h, h[:1], swap_inputs=True).sum().backward()
    assert on_disk.offloaded_bytes - moved == BYTES, "two views of one storage"


def test_an_input_that_backward_never_reads_is_not_swapped(on_disk: Swapping) -> None:
    moved = on_disk.offloaded_bytes
    checkpoint(lambda x, y: x.sin() + y, leaf() * 2, leaf(1) * 2, swap_inputs=True).sum().backward()
    assert on_disk.offloaded_bytes - moved == BYTES, "the input of sin"


def test_a_region_without_residuals_keeps_nothing(on_disk: Swapping) -> None:
    moved = on_disk.offloaded_bytes
    for options in ({}, {"swap_inputs": True}, {"policy_fn": answer(SWAP)}, {"policy_fn": answer(SAVE)}):
        x = leaf()
        with Executed() as executed:
            h = x * 2
            out = checkpoint(lambda x: (x + 1) * 2.0 - 3, h, **options)
            del h
        assert executed.living() == {"sub"}, f"{options}"
        out.sum().backward()
    assert on_disk.offloaded_bytes == moved


def test_the_input_of_a_recomputed_region_dies_with_its_backward(on_disk: Swapping) -> None:
    x = leaf()
    with Executed() as executed:
        out = checkpoint(chain, x * 2)
    assert "mul" in executed.living()
    out.sum().backward()
    assert "mul" not in executed.living()


def test_a_nested_region_keeps_no_more_than_the_outer_one(on_disk: Swapping) -> None:
    def outer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return checkpoint(product_at_the_end, checkpoint(product_at_the_end, x, w), w).tanh()

    assert living_after(outer) == {"tanh"}


# -- random programs ----------------------------------------------------------------------------------------------------------------

CHANGES_IN_PLACE = frozenset({
    "in place on what is fresh",
    "index writes",
    "in place without gradient",
    "a batch norm that trains",
    "a counter in a buffer",
    "a function that marks its input dirty",
    "changes an input",
    "changes an input without a gradient",
    "changes a cache",
})  # fmt: skip
ONE_BACKWARD = frozenset({
    "backward twice", "two losses", "two losses, last first", "double backward", "backward in another thread",
    "two forwards", "two forwards, last first", "gradients of a subset",
})  # fmt: skip
OTHERS = frozenset({
    "PyTorch's own checkpoint inside",  # it recomputes by itself
    "empty tensors",  # there is no byte to keep
    "a part under autocast",  # a weight is cast again (rule 3)
    "autocast around regions",
})  # fmt: skip


def in_manner(program: Program, manner: Manner) -> Program:
    """The program without nested regions, each of which in the same manner."""

    def flat(steps: Any, depth: int) -> Any:
        for step in steps:
            if not isinstance(step, Region):
                yield step
            elif depth == 0:
                yield step._replace(body=tuple(flat(step.body, 1)), manner=manner._replace(seed=step.manner.seed))
            else:
                yield from flat(step.body, depth)

    return program._replace(steps=tuple(flat(program.steps, 0)))


def kernels(runner: Runner, program: Program, *, managed: bool) -> Counter[str]:
    with Executed() as executed:
        runner.run(program, managed=managed)
    return executed.counts


@pytest.mark.parametrize("policy", ["no policy", "save all", "swap all", "a mix", "a list of ops"])
def test_random_programs_run_no_op_again_that_is_kept_and_no_other_more_than_once(
    on_disk: Swapping, policy: str
) -> None:
    runner = Runner(checkpoint)
    num_again = 0
    for seed in share(500, 40):
        program = draw(70_000 + seed, without=CHANGES_IN_PLACE | ONE_BACKWARD | OTHERS)
        program = in_manner(program, Manner(policy))
        with Executed() as forward:
            runner.run(program, managed=False)
        plain, managed = kernels(runner, program, managed=False), kernels(runner, program, managed=True)
        again = managed - plain
        num_again += again.total()
        where = f"{again}\n{program.describe()}"
        if policy in ("save all", "swap all"):
            assert again == Counter(), f"run again although it was kept: {where}"
        assert again - forward.counts == Counter(), f"run more than once again: {where}"
    assert (num_again > 0) == (policy not in ("save all", "swap all"))
