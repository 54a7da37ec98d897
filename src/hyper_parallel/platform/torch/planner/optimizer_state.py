"""How much an optimizer will hold, counted where it has its state already and told beforehand where it has none.

Of a kind that is not known, stand-ins take a step: for each group of parameters one of each shape, on the host if the
optimizer works there.
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.torch.regions.local_parts import local_tensor
from hyper_parallel.platform.trees import leaves

# Tensors like the parameter that one of each kind has.
_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adagrad": 1, "SGD": 0, "RMSprop": 1}


def optimizer_bytes(optimizer: Any, device: torch.device, *, is_reserved: bool = False) -> int:
    """Count what an optimizer will hold beside what is allocated already.

    `is_reserved`: what cannot be told is counted elsewhere.

    Raises:
        ValueError: its state is not there yet, and not even stand-ins of its parameters can take a step.
    """
    if optimizer is None:
        return 0
    if not hasattr(optimizer, "param_groups"):
        raise ArgumentTypeError(
            "`optimizer` is the one that trains the model.",
            expected="a torch.optim.Optimizer, or None",
            got=describe(optimizer),
        )
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer  # Accelerate and Lightning wrap the one that holds the state
    found = _bytes_on(optimizer.state, device)
    if found:
        return found if device.type == "cpu" else 0  # an accelerator's allocator has counted it
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    copies = _copies_of_parameters(optimizer)
    if copies is not None:
        return copies * sum(map(_num_bytes, trained))
    for place in dict.fromkeys((torch.device("cpu"), device)):
        try:
            return _by_stand_ins(optimizer, place)
        except Exception as error:  # whatever a class of somebody's raises
            failure = error
    if is_reserved:
        return 0
    raise ArgumentError(
        "How much this optimizer will hold is not known, and a step of it on stand-ins of the parameters failed.",
        expected="an optimizer that has taken a step, or that can take one by itself",
        got=f"{type(optimizer).__name__}: {type(failure).__name__}: {failure}".partition("\n")[0],
        do="Take one step with it before planning, or give its bytes as reserve=.",
    ) from failure


def _copies_of_parameters(optimizer: Any) -> int | None:
    """Say how many tensors like the parameter this kind holds. None: the kind is not known."""
    groups = optimizer.param_groups
    if type(optimizer).__name__ == "LBFGS":  # its history grows, so that one step tells little
        return 2 * max(int(group["history_size"]) for group in groups) + 3
    copies = _COPIES.get(type(optimizer).__name__)
    if copies is None:
        return None
    if any(group.get("momentum") for group in groups):
        copies += 1
    return copies + int(any(group.get("amsgrad") or group.get("centered") for group in groups))


def _by_stand_ins(optimizer: Any, place: torch.device) -> int:
    """Count what the state takes after one step of stand-ins.

    Parameters of one shape and group are taken to have as much of it each.
    """
    total = 0
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        kinds = collections.Counter(
            (tuple(local_tensor(parameter).shape), parameter.dtype)
            for parameter in group["params"]
            if parameter.requires_grad
        )
        for (shape, dtype), number in kinds.items():
            stand_in = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=place))
            stand_in.grad = torch.zeros_like(stand_in)
            other = object.__new__(type(optimizer))  # `copy.copy` asks `__getstate__`, which leaves most out
            vars(other).update({name: _without_parameters(value, stand_in) for name, value in vars(optimizer).items()})
            other.state = collections.defaultdict(dict)
            other.param_groups = [{**copy.deepcopy(options), "params": [stand_in]}]
            for name in [name for name in vars(other) if name.startswith("_optimizer_step_")]:
                setattr(other, name, collections.OrderedDict())
            type(optimizer).step(other)
            total += number * _bytes_on(other.state, place)
    return total


def _without_parameters(value: object, stand_in: torch.nn.Parameter) -> Any:
    """Copy an attribute for another optimizer, which is to change nothing of the first."""
    if not isinstance(value, (list, dict, set)):
        return value
    has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves(value))
    return [stand_in] if has_tensors and isinstance(value, list) else copy.copy(value)


def _bytes_on(state: Any, device: torch.device) -> int:
    tensors = {id(leaf): leaf for own in state.values() for leaf in leaves(own) if isinstance(leaf, torch.Tensor)}
    return sum(_num_bytes(tensor) for tensor in tensors.values() if tensor.device == device)


def _num_bytes(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    return local.numel() * local.element_size()
