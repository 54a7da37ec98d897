"""A schedule, carried out: each rank goes through its own list of actions.

Example, rank 1 of `one_f_one_b(2, 2)`: `1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1`. The first action begins
to receive, `1F0` waits for it and runs the stage, `1B0` runs backward from the loss, `1SEND_B0` begins to send the
gradient of what was received.

The schedule was proved to end even if each send waits for its receive, and messages from one rank to another arrive in
the order in which they were sent. So nothing here waits for a send before the step is over, and receives need no
numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.backend import TensorMeta
from hyper_parallel.core.parallel.pipeline.actions import RECEIVES, Action, Kind
from hyper_parallel.core.parallel.pipeline.coordinator import HookCoordinator, overlap_forward_backward
from hyper_parallel.core.parallel.pipeline.copies import Copies
from hyper_parallel.core.parallel.pipeline.exchange import Exchange, Name
from hyper_parallel.core.parallel.pipeline.messages import Form, form_of, rebuilt
from hyper_parallel.core.parallel.pipeline.schedule import Schedule
from hyper_parallel.core.parallel.pipeline.sharded_stages import ShardedStages
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage, StageRun, StageWeight
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.arguments import check_flag
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Tensor

__all__ = ["Microbatch", "Pipeline"]

_NUM_AHEAD = 2  # receives that are begun before their turn, so that what is sent meanwhile has somewhere to go


class Pipeline:
    """The stages of this rank, and the schedule that all ranks follow.

    Args:
        stages: this rank's `PipelineStage`s, as `schedule.placement` places them; a single one needs no list.
        schedule: for example `hp.schedules.one_f_one_b(p, m)`. All ranks give the same one.
        loss_fn: makes a loss of the last stage's output and the target. Without it the output is the loss, or has one
            as `.loss`.
        mesh: whose ranks along `axis` are the pipeline's, in order; without it all ranks of the world are.
        axis: the name of that axis.
        args_batch_dim: the dim along which each argument is cut, as in `platform.micro_batch`; 0 without.
        kwargs_batch_dim: the same for keywords.
        dynamic_shapes: whether what goes from stage to stage may look different in each step.
        coordinator: runs the pairs of a schedule at the same time. Without it, one part of a pair after the other.

    Raises:
        ValueError: the schedule cannot run, or places other stages on this rank.

    Example:
        `Pipeline(PipelineStage(half, rank, 2), hp.schedules.one_f_one_b(2, 8), loss_fn=loss_fn).step(x, target=y)`
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        schedule: Schedule,
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        mesh: DeviceMesh | None = None,
        axis: str = "pp",
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
        dynamic_shapes: bool = False,
        coordinator: HookCoordinator | None = None,
    ) -> None:
        given = list(stages) if isinstance(stages, Iterable) else [stages]
        if not given or not all(isinstance(stage, PipelineStage) for stage in given):
            raise ArgumentTypeError("A pipeline has stages.", expected="PipelineStage objects", got=describe(stages))
        if not isinstance(schedule, Schedule):
            raise ArgumentTypeError(
                "A pipeline follows a schedule.",
                expected="for example hp.schedules.one_f_one_b(p, m)",
                got=describe(schedule),
            )
        self.stages = {stage.index: stage for stage in sorted(given, key=lambda stage: stage.index)}
        self.schedule = schedule
        self.loss_fn = loss_fn
        self.coordinator = coordinator
        self._platform = platform_of(given[0].module)
        self._backend = given[0].backend
        # Asked when it is needed: stages that were built on "meta" are filled after this.
        self._device: Callable[[], Any] = lambda: given[0].device
        self._ranks = _world_ranks(self._platform, mesh, axis, schedule.num_ranks)
        self._rank = self._ranks.index(self._platform.get_rank())
        self._check_placement(given)
        for stage in given:
            if stage.is_last:
                stage.train_with(loss_fn)
        self._sharded = ShardedStages(self.stages)
        self._actions = schedule.lower(zero=self._sharded.zero).ranks[self._rank]
        self._cut = self._platform.micro_batch(schedule.num_microbatches, args_batch_dim, kwargs_batch_dim)
        self._cut_target = self._platform.micro_batch(schedule.num_microbatches)
        self._group = None if mesh is None else mesh.get_group(axis)
        self._exchange = Exchange(
            self._platform,
            self._backend,
            schedule.placement,
            device=self._device,
            group=self._group,
            world_ranks=self._ranks,
            is_dynamic=check_flag(dynamic_shapes, "dynamic_shapes"),
        )
        everywhere = self._weights_everywhere(is_dynamic=dynamic_shapes)
        self._copies = Copies(self._exchange, self.stages, self._rank, everywhere)
        self._are_copies_equal = False
        self._is_dynamic = dynamic_shapes
        self._loss_meta: TensorMeta | None = None
        self._is_broken = False

    def _weights_everywhere(self, *, is_dynamic: bool) -> list[dict[int, list[StageWeight]]]:
        """Ask all ranks for the weights of their stages, and hold their schedules against this rank's."""
        mine = (self.schedule.ranks, is_dynamic, {stage.index: stage.weights() for stage in self.stages.values()})
        found = [mine] * len(self._ranks)
        if len(self._ranks) > 1:
            self._platform.all_gather_object(found, mine, self._group)
        others = [str(rank) for rank, answer in enumerate(found) if answer[:2] != mine[:2]]
        if others:
            raise ArgumentError(
                "All ranks of a pipeline follow one schedule.",
                expected="the same schedule and `dynamic_shapes` on all ranks",
                got=f"another one on rank {', '.join(others)} of the pipeline",
                where=f"rank {self._rank}",
            )
        return [weights for _, _, weights in found]

    def _check_placement(self, given: Sequence[PipelineStage]) -> None:
        expected = self.schedule.placement.stages_on(self._rank)
        got = tuple(sorted(stage.index for stage in given))
        sizes = {stage.num_stages for stage in given}
        if got != expected or sizes != {self.schedule.num_stages}:
            raise ArgumentError(
                "The schedule places other stages here.",
                expected=f"stages {list(expected)} of {self.schedule.num_stages}",
                got=f"stages {list(got)} of {', '.join(map(str, sorted(sizes)))}",
                where=f"rank {self._rank} of the pipeline",
            )

    @property
    def group(self) -> Any:
        """The pipeline's ranks, as communication takes them; None: all ranks."""
        return self._group

    def parameters(self) -> list[Tensor]:
        """The weights of this rank's stages that are trained, each once, for an optimizer."""
        return [weight for _, _, weight in self._trained()]

    def gradients(self) -> tuple[Tensor | None, ...]:
        """The gradients of `parameters()`, as MindSpore's optimizers take them."""
        return tuple(stage.gradient(name) for stage, name, _ in self._trained())

    def zero_grad(self) -> None:
        """Let go of the gradients of this rank's stages."""
        for stage, name, _ in self._trained():
            stage.set_gradient(name, None)

    def _trained(self) -> list[tuple[PipelineStage, str, Tensor]]:
        found: dict[int, tuple[PipelineStage, str, Tensor]] = {}
        for stage in self.stages.values():
            for name, weight in stage.trained():
                found.setdefault(id(weight), (stage, name, weight))
        return list(found.values())

    def step(self, *args: Any, target: Any = None, weights: Sequence[float] | None = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of one batch on all ranks; the loss, the same on each.

        Gradients are added to those that are there, as in a loop of `loss.backward()`: weights of a stage have the
        gradients that one process has for the whole batch.

        Args:
            args: what the first stage takes; ranks without that stage may leave them out.
            target: what `loss_fn` takes beside the last stage's output; ranks without that stage may leave it out.
            weights: what each microbatch counts, for example its number of valid tokens; equal without. The loss is the
                sum of weight times loss over the sum of weights, on all ranks.
            kwargs: what each stage of this rank takes.
        """
        has_first, has_last = 0 in self.stages, self.schedule.num_stages - 1 in self.stages
        args, kwargs = self._as_taken(args, kwargs)
        cut_args, cut_kwargs = self._cut(args if has_first else (), kwargs)
        targets, _ = self._cut_target((target if has_last else None,))
        return self.step_of(
            [Microbatch(tuple(a), k, t) for a, k, (t,) in zip(cut_args, cut_kwargs, targets, strict=True)],
            weights=weights,
        )

    def step_of(self, microbatches: Sequence[Microbatch], *, weights: Sequence[float] | None = None) -> Tensor:
        """Run forward and backward of microbatches that are cut already, of any lengths; see `step`."""
        num = self.schedule.num_microbatches
        if len(microbatches) != num:
            raise ArgumentError(
                "The schedule is for another number of microbatches.", expected=str(num), got=str(len(microbatches))
            )
        microbatches = [Microbatch(*self._as_taken(one.args, one.kwargs), one.target) for one in microbatches]
        factors = _factors(self._own_weights(microbatches) if weights is None else weights, num)
        if self._is_broken:
            raise StateError(
                "A step of this pipeline failed, and its ranks may have got to different places.",
                do="Make the Pipeline anew on all ranks.",
            )
        self._is_broken = True  # until this step has come to its end
        try:
            if not self._are_copies_equal:
                self._copies.make_equal()
                self._are_copies_equal = True
            step = _Step(self, microbatches, factors)
            with self._copies.apart():
                with self._sharded.step():
                    step.run(self._actions)
                self._copies.add_up()
            loss = self._share(step.loss)
        finally:
            self._exchange.forget()
        self._is_broken = False
        return loss

    def _as_taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a step was given, as the stages of this rank take it; they are parts of one model."""
        args, kwargs = next(iter(self.stages.values())).as_taken(args, kwargs)
        return tuple(args), kwargs

    def _own_weights(self, microbatches: Sequence[Microbatch]) -> list[float] | None:
        """What each microbatch counts, where the last stage makes its own loss and says so."""
        last = self.stages.get(self.schedule.num_stages - 1)
        if last is None or self.loss_fn is not None:
            return None
        found = [last.weight_of(microbatch.kwargs) for microbatch in microbatches]
        return None if None in found else [weight for weight in found if weight is not None]

    def _share(self, loss: Tensor | None) -> Tensor:
        """Give all ranks the sum of the losses, of which the ranks with the last stage have parts."""
        if len(self._ranks) > 1:
            mine = None if loss is None else self._backend.meta(loss)
            if self._loss_meta is None or self._is_dynamic:
                metas: list[TensorMeta | None] = [None] * len(self._ranks)
                self._platform.all_gather_object(metas, mine, self._group)
                self._loss_meta = next(meta for meta in metas if meta is not None)
            elif mine is not None:
                Form(None, (mine,)).check_same(Form(None, (self._loss_meta,)), "The loss")
            part = self._backend.zeros(self._loss_meta, self._device()) if loss is None else loss
            return self._platform.all_reduce(part, self._group)
        return loss


@dataclass(frozen=True)
class Microbatch:
    """What one microbatch brings: arguments of the first stage, keywords of every stage, the target of the loss."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: object = None


class _Step:
    """One step of one rank: its stages' microbatches, and the sum of the losses so far."""

    def __init__(self, pipeline: Pipeline, microbatches: Sequence[Microbatch], factors: Sequence[float]) -> None:
        self._pipeline = pipeline
        self._backend = pipeline._backend
        self._exchange = pipeline._exchange
        self._microbatches = microbatches
        self._factors = factors
        self._runs = {index: StageRun(stage) for index, stage in pipeline.stages.items()}
        self.loss: Tensor | None = None

    def run(self, actions: Sequence[Action]) -> None:
        receives = [action for action in actions if action.kind in RECEIVES]
        num_begun = num_due = 0
        for action in actions:
            num_due += action.kind in RECEIVES
            while num_begun < min(num_due + _NUM_AHEAD, len(receives)):
                if num_begun >= num_due and not self._exchange.may_receive_ahead(receives[num_begun]):
                    break
                self._exchange.launch_receive(receives[num_begun])
                num_begun += 1
            if action.kind not in RECEIVES:
                self._do(action)
        self._exchange.join()

    def _do(self, action: Action) -> None:
        kind, stage, number = action.kind, action.stage, action.microbatch
        if kind is Kind.OVERLAP:
            forward, backward = action.parts
            if self._pipeline.coordinator is None:
                self._do(forward)
                self._do(backward)
            else:
                overlap_forward_backward(
                    functools.partial(self._do, forward),
                    functools.partial(self._do, backward),
                    self._pipeline.coordinator,
                )
        elif number is None:
            self._pipeline._sharded.do(action)
        elif kind is Kind.FORWARD:
            self._forward(stage, number)
        elif kind is Kind.BACKWARD:
            self._hand_back(stage, number, self._runs[stage].backward(number, self._gradients(stage, number)))
        elif kind is Kind.INPUT_GRAD:
            self._hand_back(stage, number, self._runs[stage].backward_of_inputs(number, self._gradients(stage, number)))
        elif kind is Kind.WEIGHT_GRAD:
            self._runs[stage].backward_of_weights(number)
        else:
            self._exchange.launch_send(action)

    def _forward(self, stage: int, number: int) -> None:
        """Run the forward of a stage, and put what the next one takes."""
        microbatch, place = self._microbatches[number], self._pipeline.stages[stage]
        inputs: list[Tensor] = []
        args: Sequence[Any] = microbatch.args
        if not place.is_first:
            form, tensors = self._exchange.take(Name(Kind.FORWARD, stage - 1, number))
            metas = [meta for meta in form.metas if meta is not None]
            leaves = [
                self._backend.as_input(tensor, requires_grad=meta.requires_grad)
                for tensor, meta in zip(tensors, metas, strict=True)
            ]
            inputs = [leaf for leaf, meta in zip(leaves, metas, strict=True) if meta.requires_grad]
            given = rebuilt(form, leaves)
            args = given if isinstance(given, tuple) else (given,)
        if place.is_last:
            loss_of = functools.partial(self._loss_of, number, is_trained=bool(inputs or place.trained()))
            self._runs[stage].forward(number, args, microbatch.kwargs, inputs, loss_of)
        else:
            form, tensors = self._runs[stage].forward(number, args, microbatch.kwargs, inputs, self._handed_on)
            self._exchange.put(Name(Kind.FORWARD, stage, number), form, tensors)

    def _handed_on(self, output: object) -> tuple[tuple[Form, list[Tensor]], list[Tensor]]:
        form, tensors = form_of(self._backend, output)
        differentiable = [
            tensor for tensor, meta in zip(tensors, form.metas, strict=True) if meta and meta.requires_grad
        ]
        return (form, [self._backend.as_sent(tensor) for tensor in tensors]), differentiable

    def _loss_of(self, number: int, output: object, *, is_trained: bool) -> tuple[None, list[Tensor]]:
        if self._pipeline.loss_fn is not None:
            loss = self._pipeline.loss_fn(output, self._microbatches[number].target)
        else:
            loss = output if self._backend.is_tensor(output) else getattr(output, "loss", output)
        if not self._backend.is_tensor(loss) or self._backend.meta(loss).shape not in ((), (1,)):
            raise ArgumentError(
                "The last stage gives no loss.",
                expected="one number in a tensor",
                got=describe(loss),
                where=f"microbatch {number}",
                do="Give loss_fn=, which makes one of the last stage's output and the target.",
            )
        factor = self._factors[number]
        if factor == 0.0:  # a mean over nothing is not a number, and would be none times zero
            tensors = [tensor for tensor in form_of(self._backend, output)[1] if tensor is not loss]
            there = [tensor for tensor in tensors if self._backend.meta(tensor).requires_grad]
            loss = self._backend.nothing_of(there, loss) if there else loss
        scaled = self._backend.scaled(loss, factor)
        self.loss = self._backend.add(self.loss, scaled)
        if self._backend.meta(scaled).requires_grad:
            return None, [scaled]
        if is_trained:
            raise ArgumentError(
                "The loss depends on no weight, so that nothing would be trained.",
                expected="a loss made of the last stage's output",
                got="one without a gradient",
                where=f"microbatch {number}",
            )
        return None, []

    def _gradients(self, stage: int, number: int) -> list[Tensor | None] | None:
        """What comes back from the next stage, None for what did not need a gradient there; of the last stage, None."""
        if self._pipeline.stages[stage].is_last:
            return None
        form, tensors = self._exchange.take(Name(Kind.BACKWARD, stage + 1, number))
        there = iter(tensors)
        return [None if meta is None else next(there) for meta in form.metas]

    def _hand_back(self, stage: int, number: int, gradients: Sequence[Tensor | None]) -> None:
        """Put the gradients of a stage's inputs for the stage before."""
        if self._pipeline.stages[stage].is_first:
            return
        there = [gradient for gradient in gradients if gradient is not None]
        metas = tuple(None if gradient is None else self._backend.meta(gradient) for gradient in gradients)
        self._exchange.put(Name(Kind.BACKWARD, stage, number), Form(None, metas), there)


def _world_ranks(platform: Platform, mesh: DeviceMesh | None, axis: str, num: int) -> tuple[int, ...]:
    """The pipeline's ranks, in its order."""
    mine = platform.get_rank()
    ranks = tuple(range(platform.get_world_size())) if mesh is None else mesh.ranks_along(axis, mine)
    if len(ranks) != num:
        raise ArgumentError(
            "The schedule is for another number of ranks.",
            expected=f"{num} ranks",
            got=f"{len(ranks)}" + ("" if mesh is None else f" along {axis!r}"),
        )
    return ranks


def _factors(weights: Sequence[float] | None, num: int) -> list[float]:
    """What each microbatch's loss is multiplied by."""
    if weights is None:
        return [1.0 / num] * num
    if len(weights) != num:
        raise ArgumentError("Each microbatch has one weight.", expected=str(num), got=str(len(weights)))
    total = float(sum(weights))
    if not (0 < total < math.inf and all(weight >= 0 for weight in weights)):
        raise ArgumentError(
            "Weights count something.", expected="finite numbers from 0, at least one above", got=describe(weights)
        )
    return [float(weight) / total for weight in weights]
