"""Activation memory through the platform: each entry leads to the part that does it."""

from __future__ import annotations

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.swap.config import configure_swap
from hyper_parallel.core.swap.engines import total_stats
from support.backends import Backend

SIGNATURES = """
ckpt_wrapper(module, checkpoint_fn=None, **checkpoint_fn_kwargs)
swap_wrapper(module, policy_fn=None)
create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation=False)
async_save_on_cpu(policy_fn=None)
""".strip().splitlines()


def part(backend: Backend) -> Any:
    return importlib.import_module(
        f"hyper_parallel.platform.{backend.platform.platform_type.value}.activation_checkpoint"
    )


def steps_equal(backend: Backend, model: Any, wrapped: Any, x: Any) -> bool:
    expected, found = backend.train_step(model, x), backend.train_step(wrapped, x)
    return list(expected) == list(found) and all(np.array_equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("line", SIGNATURES, ids=lambda line: line.partition("(")[0])
def test_signatures_are_those_of_the_specification(platform: Any, line: str) -> None:
    name, _, wanted = line.partition("(")
    for owner in (platform, type(platform)):
        signature = inspect.signature(getattr(owner, name))
        bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        assert str(signature.replace(parameters=bare, return_annotation=signature.empty)) == "(" + wanted


@pytest.mark.covers("checkpoint")
def test_checkpoint_is_the_region_function_itself(backend: Backend, platform: Any) -> None:
    assert platform.checkpoint is platform.checkpoint is part(backend).checkpoint
    x = backend.tensor([1.0, 2.0])
    calls = []

    def function(y: Any, *, plus: float) -> Any:
        calls.append(1)
        return (y * y + plus).exp()

    (found,) = backend.grad_of(lambda y: platform.checkpoint(function, y, plus=1.0), x)
    assert len(calls) == 2
    (expected,) = backend.grad_of(lambda y: function(y, plus=1.0), x)
    assert np.array_equal(found, expected)


@pytest.mark.covers("noop_context_fn")
def test_the_noop_contexts_do_nothing(platform: Any) -> None:
    first, second = platform.noop_context_fn()
    with first as one, second as two:
        assert (one, two) == (None, None)
    assert platform.noop_context_fn is platform.noop_context_fn
    with pytest.raises(OSError, match="passes"), platform.noop_context_fn()[0]:
        raise OSError("passes")


@pytest.mark.covers("create_selective_checkpoint_contexts")
def test_selective_contexts_are_a_pair_for_forward_and_recomputation(backend: Backend, platform: Any) -> None:
    asked: list[bool] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(ctx.is_recompute)
        return CheckpointPolicy.MUST_SAVE

    x = backend.tensor([[1.0, 2.0]])
    for on in (platform, type(platform)):
        asked.clear()
        forward, recompute = on.create_selective_checkpoint_contexts(policy)
        with forward:
            first = (x * 2).exp()
        assert asked
        assert not any(asked)
        with recompute:
            second = (x * 2).exp()
        assert np.array_equal(backend.numbers(first), backend.numbers(second))


@pytest.mark.covers("create_selective_checkpoint_contexts")
def test_a_saved_value_that_was_changed_is_an_error_unless_that_is_allowed(backend: Backend, platform: Any) -> None:
    if backend.name.startswith("mindspore"):
        pytest.skip("`+=` makes a new tensor on MindSpore, and no write is counted on its CPU")
    x = backend.tensor([[1.0, 2.0]])

    def run(allow: bool) -> Any:
        contexts = platform.create_selective_checkpoint_contexts(
            lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE, allow_cache_entry_mutation=allow
        )
        with contexts[0]:
            made = x.exp()
        made += 1
        with contexts[1]:
            return x.exp()

    with pytest.raises(RuntimeError, match="(?s)in place.*allow_cache_entry_mutation"):
        run(False)
    assert np.array_equal(backend.numbers(run(True)), backend.numbers(x.exp())), "it is made again"


@pytest.mark.covers("async_save_on_cpu")
def test_a_block_for_saved_tensors_swaps_what_its_policy_says(backend: Backend, platform: Any, tmp_path: Path) -> None:
    asked = []

    def policy(tensor: Any) -> bool:
        asked.append(tuple(tensor.shape))
        return False

    block = platform.async_save_on_cpu(policy)
    assert type(block) is part(backend).AsyncSaveOnCpu
    assert block.policy_fn is policy
    assert platform.async_save_on_cpu().policy_fn is None
    x = backend.tensor([[1.0, 2.0, 3.0]])

    def run(y: Any) -> Any:
        with block:
            return y.exp()

    before = total_stats().offloaded_bytes
    with configure_swap(disk_dir=tmp_path, min_bytes=1):
        (found,) = backend.grad_of(run, x)
    assert np.array_equal(found, backend.grad_of(lambda y: y.exp(), x)[0])
    assert asked == [(1, 3)]
    assert total_stats().offloaded_bytes - before >= 12


@pytest.mark.covers("ckpt_wrapper")
def test_a_wrapped_module_is_recomputed_under_its_old_names(backend: Backend, platform: Any) -> None:
    model = backend.model()
    x = backend.tensor(np.arange(6).reshape(2, 3) / 7)
    for options in ({}, {"preserve_rng_state": False}, {"policy_fn": lambda *_, **__: True}, {"swap_inputs": True}):
        wrapper = platform.ckpt_wrapper(model, **options)
        assert type(wrapper) is part(backend).CheckpointWrapper
        assert list(platform.parameters_dict(wrapper)) == list(platform.parameters_dict(model))
        assert steps_equal(backend, model, wrapper, x)


@pytest.mark.covers("ckpt_wrapper")
def test_without_a_function_the_frameworks_own_checkpoint_runs_the_module(backend: Backend, platform: Any) -> None:
    calls = []

    def contexts() -> Any:
        calls.append(1)
        return platform.noop_context_fn()

    model = backend.model()
    wrapper = platform.ckpt_wrapper(model, context_fn=contexts)
    assert wrapper.checkpoint_fn.func is backend.own_checkpoint()
    assert steps_equal(backend, model, wrapper, backend.tensor(np.ones((1, 3))))
    assert calls == [1]
    assert platform.ckpt_wrapper(model, policy_fn=[]).checkpoint_fn.func is platform.checkpoint
    assert platform.ckpt_wrapper(model, swap_inputs=True).checkpoint_fn.func is platform.checkpoint


@pytest.mark.covers("ckpt_wrapper")
def test_a_given_function_runs_the_module_with_its_keywords(backend: Backend, platform: Any) -> None:
    calls = []

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((function, kwargs))
        return function(*args)

    model = backend.model()
    x = backend.tensor(np.ones((1, 3)))
    assert steps_equal(backend, model, type(platform).ckpt_wrapper(model, run, option=3), x)
    assert calls == [(model, {"option": 3})]
    wrapper = platform.ckpt_wrapper(model, functools.partial(platform.checkpoint, policy_fn=[]))
    assert steps_equal(backend, model, wrapper, x)


@pytest.mark.covers("swap_wrapper")
def test_a_swapped_module_asks_the_policy_and_keeps_its_names(backend: Backend, platform: Any, tmp_path: Path) -> None:
    asked = []

    def policy(tensor: Any) -> bool:
        asked.append(tuple(tensor.shape))
        return False

    model = backend.model()
    wrapper = platform.swap_wrapper(model, policy)
    assert type(wrapper) is part(backend).SwapWrapper
    assert wrapper.policy_fn is policy
    assert type(platform).swap_wrapper(model).policy_fn is None
    before = total_stats().offloaded_bytes
    with configure_swap(disk_dir=tmp_path, min_bytes=1):
        assert steps_equal(backend, model, wrapper, backend.tensor(np.ones((1, 3))))
    assert (1, 4) in asked, "what the first layer makes"
    assert total_stats().offloaded_bytes > before
    assert list(platform.parameters_dict(wrapper)) == list(platform.parameters_dict(model))


def test_the_public_function_shows_the_options_that_are_its_own() -> None:
    import hyper_parallel as hp

    assert list(inspect.signature(hp.checkpoint).parameters) == [
        "function",
        "args",
        "swap_inputs",
        "policy_fn",
        "options",
    ]
