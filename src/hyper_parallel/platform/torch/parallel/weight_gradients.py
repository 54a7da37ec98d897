"""A backward in two parts: gradients of a stage's inputs now, gradients of its weights later.

Example, a stage `linear2(relu(linear1(x)))`. Autograd's graph, from the result down:

    addmm 2 ── relu ── addmm 1 ── x
      │                  │
    w2, b2             w1, b1

The *path* is what leads to an input: addmm 2, relu, addmm 1. An edge that leaves the path is a *branch*: from addmm 2
to w2. `backward_of_inputs` runs the path, and notes what arrives at each node that has branches. `DeferredWeights.run`
runs these nodes once more, from what was noted, for their branches alone. Nothing that a node does for an input is done
twice.

A weight is any leaf that is no input. Three kinds of weights get their gradients in the first part: one that several
branches lead to (it is used twice), since a node that runs again for one of the branches would count what lies below it
as well; one of a user's own `autograd.Function`, which computes all its gradients whenever it runs; and one of an
output that depends on no input.

Guarantees: both parts together add to each weight's `grad` what one backward adds, and its hooks run once. Hooks of a
result inside (`register_hook`, `retain_grad`) run in both parts, with zeros in the second one, and what they make of a
gradient counts once. After an exception no hook stays. Assumes: the graph is not changed between the two parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

_AccumulateGrad = torch._C._functions.AccumulateGrad


class DeferredWeights:
    """The second part of one backward. It lives from the first part until `run`, and holds the graph with its
    activations."""

    def __init__(self, branching: list[_Branching], done: list[torch.Tensor]) -> None:
        self._branching = branching
        self.done = done  # the weights that could not wait

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight for node in self._branching for weight in node.weights]

    def run(self) -> None:
        """Add the gradients of the weights to their `grad`. A second call does nothing."""
        while self._branching:
            # The last reference to a node goes here, and with it what it keeps: memory falls while this runs.
            self._branching.pop().run()


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
) -> DeferredWeights:
    """Add the gradients of `inputs` to their `grad`, and give the rest of the backward to run later.

    Args:
        outputs: what backward begins at, with `gradients` of theirs (None: 1, for a loss).
        inputs: leaves; at least one, else there is no path to run first.

    All other leaves that the outputs lead to are weights: those of a stage, of a loss, a keyword that needs a gradient.
    """
    ends = {get_gradient_edge(value).node for value in inputs}
    branching, now = _split([get_gradient_edge(value).node for value in outputs], ends)
    with ExitStack() as hooks:
        for node in branching:
            hooks.callback(node.listen())
        torch.autograd.backward(outputs, gradients, retain_graph=True, inputs=[*inputs, *now])
    return DeferredWeights(branching, now)


class _Branching:
    """A node on the path with branches to weights that no other branch leads to. Invariant: after the first part
    `arrived` is what the node was run with, None where it was not run.
    """

    def __init__(self, node: Node, weights: list[torch.Tensor]) -> None:
        self.node = node
        self.weights = weights
        self.arrived: tuple[torch.Tensor | None, ...] = ()

    def listen(self) -> Any:
        def note(gradients: tuple[torch.Tensor | None, ...]) -> None:
            self.arrived = gradients

        return self.node.register_prehook(note).remove

    def run(self) -> None:
        there = [(number, gradient) for number, gradient in enumerate(self.arrived) if gradient is not None]
        if there:
            edges = [GradientEdge(self.node, number) for number, _ in there]
            # Hooks of the node's results ran before what arrived was noted. They get zeros now, the node what it got.
            hook = self.node.register_prehook(lambda _: self.arrived)
            try:
                zeros = [torch.zeros_like(gradient) for _, gradient in there]
                torch.autograd.backward(edges, zeros, inputs=self.weights)
            finally:
                hook.remove()


def _split(roots: list[Node], ends: set[Node]) -> tuple[list[_Branching], list[torch.Tensor]]:
    """The nodes on the path that have branches which can wait, in the order in which backward comes to them; and the
    weights that cannot wait.
    """
    below = _in_order(roots)
    leaves: dict[Node, torch.Tensor] = {
        node: node.variable for node in below if isinstance(node, _AccumulateGrad) and node not in ends
    }
    leads_to_input: dict[Node, bool] = {}
    leads_to: dict[Node, frozenset[Node]] = {}  # of a node off the path: the leaves below it
    for node in reversed(below):  # what is below a node comes before it
        children = _children(node)
        leads_to_input[node] = node in ends or any(leads_to_input[child] for child in children)
        if not leads_to_input[node]:
            own = {node} if node in leaves else set()
            leads_to[node] = frozenset(own.union(*(leads_to[child] for child in children)))
    branches = {
        node: [leads_to[child] for child in _children(node) if not leads_to_input[child]]
        for node in below
        if leads_to_input[node]
    }
    num_branches = Counter(leaf for found in branches.values() for branch in found for leaf in branch)
    now = {leaf for leaf, number in num_branches.items() if number > 1}
    for root in roots:
        if not leads_to_input[root]:  # this output is off the path as a whole
            now |= leads_to[root]
    for node, found in branches.items():
        if isinstance(node, BackwardCFunction):  # a function of Python's would do all of its work a second time
            now.update(*found)
    result = []
    for node, found in branches.items():
        weights = [leaves[leaf] for branch in found for leaf in branch if leaf not in now]
        if weights:
            result.append(_Branching(node, weights))
    return result, [weight for leaf, weight in leaves.items() if leaf in now]


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _in_order(roots: list[Node]) -> list[Node]:
    """All nodes that the roots lead to, each before those that it leads to itself."""
    done: dict[Node, None] = {}
    seen: set[Node] = set()
    waiting = [(root, False) for root in roots]
    while waiting:
        node, is_left = waiting.pop()
        if is_left:
            done[node] = None
        elif node not in seen:
            seen.add(node)
            waiting.append((node, True))
            waiting.extend((child, False) for child in _children(node))
    return list(reversed(done))
