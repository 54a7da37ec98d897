"""Users' own functions with rules of every level; runs in worker processes, on PyTorch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch

import hyper_parallel as hp
from hyper_parallel.core.shard import registry
from support.dtensor_cases import layouts_of
from support.dtensor_programs import mesh_named
from support.process_worker import keep_platform_groups


def _functions() -> dict[str, Any]:
    class Project(hp.DFunction):
        """x @ w.T, written by hand."""

        _op_name = "Project"

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x @ w.T

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return grad @ w, grad.flatten(0, -2).T @ x.flatten(0, -2)

    class Centred(hp.DFunction):
        """Rows minus their mean, and the mean: the last dim must be whole."""

        _op_name = "Centred"

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            mean = x.mean(-1)
            return x - mean.unsqueeze(-1), mean

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, grad_of_mean: torch.Tensor) -> Any:
            whole = grad_of_mean - grad.sum(-1)
            return grad + whole.unsqueeze(-1) / grad.shape[-1]

    return {"Project": (Project, ((3, 4, 6), (8, 6))), "Centred": (Centred, ((4, 5, 6),))}


def short_rules(mesh_name: str) -> dict[str, Any]:
    """An equation for one function, strategies for the other, on many layouts: values and gradients."""
    mesh = mesh_named(mesh_name)
    hp.EinsumRule("Project", "... k, n k -> ... n", is_linear=True)
    shard, whole = hp.Shard, hp.Replicate()
    hp.StrategyRule("Centred", [([shard(dim)], [shard(dim), shard(dim)]) for dim in (0, 1)])
    choice = random.Random(1)
    compared, largest = 0, 0.0
    try:
        for function, shapes in _functions().values():
            tensors = [torch.randn(shape) for shape in shapes]
            leaves = [t.clone().requires_grad_() for t in tensors]
            right = _listed(function.apply(*leaves))
            weights = [torch.randn(r.shape) for r in right]
            torch.autograd.backward(right, weights)
            options = [sorted(set(layouts_of(mesh, t.ndim, True)), key=repr) for t in tensors]
            combinations = list(itertools.product(*options))
            for layouts in choice.sample(combinations, min(len(combinations), 40)):
                mine = [
                    hp.distribute_tensor(t, at).detach().requires_grad_()
                    for t, at in zip(tensors, layouts, strict=True)
                ]
                results = _listed(function.apply(*mine))
                parts = [(r * hp.distribute_tensor(w, mesh)).sum() for r, w in zip(results, weights, strict=True)]
                sum(parts[1:], parts[0]).backward()
                pairs = [(r.full_tensor(), v) for r, v in zip(results, right, strict=True)]
                pairs += [(m.grad.full_tensor(), leaf.grad) for m, leaf in zip(mine, leaves, strict=True)]
                largest = max([largest, *((a - b).abs().max().item() for a, b in pairs)])
                compared += 1
    finally:
        registry.unregister("Project")
        registry.unregister("Centred")
        keep_platform_groups()
    assert whole.is_replicate()
    return {"compared": compared, "largest difference": largest}


def prepared_rule() -> dict[str, bool]:
    """A rule with `preprocess` and `get_expand_impl`: it takes the local tensors out itself, and replaces the operation."""
    mesh = mesh_named("4")

    class Rule(hp.DistributedOp):
        def preprocess(self, args: Any, kwargs: Any) -> Any:  # type: ignore[override]
            x, scale, power = args
            return (x.to_local(), scale.to_local(), power), {}, [x.layout, scale.layout, power]

        def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
            x, _, power = layouts
            return x, [power]

        def get_expand_impl(self, func: Any, result: Any, layouts: Any, extra_args: Any) -> Any:  # type: ignore[override]
            assert extra_args == [2]
            return lambda x, scale, power: func(x, scale, power) + 1

    class Powered(hp.DFunction):
        _op_name = "Powered"

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, power: int) -> torch.Tensor:
            ctx.save_for_backward(x, scale)
            return scale * x**power

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, scale = ctx.saved_tensors
            return grad * scale * 2 * x, (grad * x**2).sum(0), None

    Rule("Powered")
    try:
        whole, scale = torch.randn(6, 3), torch.randn(3)
        x = hp.distribute_tensor(whole, mesh, [hp.Shard(0)]).detach().requires_grad_()
        s = hp.distribute_tensor(scale, mesh).requires_grad_()
        out = Powered.apply(x, s, 2)
        out.sum().backward()
        return {
            "value": torch.allclose(out.full_tensor(), scale * whole**2 + 1),
            "gradient": torch.allclose(x.grad.full_tensor(), 2 * scale * whole),
            "gradient of what is replicated": torch.allclose(s.grad.to_local(), (whole**2).sum(0), atol=1e-5),
        }
    finally:
        registry.unregister("Powered")
        keep_platform_groups()


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]
