"""Gradients of many parameters at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.arguments import check_flag, check_norm_arguments, check_parameters


class Gradients:
    @staticmethod
    def clip_grad_norm_(
        parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most `max_norm`; return the norm before.

        `foreach` is accepted for compatibility and has no effect.
        """
        norm_type = check_norm_arguments(max_norm, norm_type)
        check_flag(error_if_nonfinite, "error_if_nonfinite")
        given = _as_parameters(parameters)
        grads = [p.grad for p in given if p.grad is not None]
        is_distributed = any(hasattr(tensor, "_local_tensor") for tensor in (*given, *grads))
        if is_distributed:
            from hyper_parallel.platform.torch.dtensor.norms import local_part, total_gradient_norm

            total = total_gradient_norm(given, norm_type)
            grads = [local_part(grad) for grad in grads]
        else:
            total = nn.utils.get_total_norm(grads, norm_type) if grads else torch.tensor(0.0)
        if error_if_nonfinite and not bool(torch.isfinite(total)):
            raise StateError(
                "The total norm of the gradients is not finite.",
                expected="a number",
                got=str(total.item()),
                where=f"{len(grads)} gradients",
                do="Look for the first loss that is not finite, or pass error_if_nonfinite=False.",
            )
        if grads:
            scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
            with torch.no_grad():
                for grad in grads:
                    grad.mul_(scale.to(grad.device))
        return total


def _as_parameters(parameters: object) -> list[torch.Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return check_parameters(parameters, torch.Tensor, "clip_grad_norm_")
