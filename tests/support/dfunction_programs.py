"""Programs with `DFunction`, the same text on both frameworks, in one process and in several. Each answers what was right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import hyper_parallel as hp
from hyper_parallel import DistributedOp, Shard, init_device_mesh
from hyper_parallel.core.shard import registry
from support.autograd_words import close, words
from support.process_worker import keep_platform_groups


@contextlib.contextmanager
def rules_of_this_program() -> Iterator[None]:
    before = set(registry._rules)
    try:
        yield
    finally:
        for name in set(registry._rules) - before:
            registry.unregister(name)


def scale_add(num_ranks: int, rows: int) -> dict[str, bool]:
    """The program of the specification as it stands, with plain and with distributed tensors."""
    from hyper_parallel import DFunction

    with rules_of_this_program():

        class ScaleAddRule(DistributedOp):
            def __init__(self):
                super().__init__("ScaleAdd")

            def infer_layout(self, layouts, extra_args=None):
                return layouts[0]

        ScaleAddRule()  # registers the rule under its name

        class ScaleAdd(DFunction):
            _op_name = "ScaleAdd"

            @staticmethod
            def forward(ctx, a, b, factor):  # local tensors, and a number
                ctx.factor = factor
                return a * factor + b

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.factor, grad, None

        say = words()
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        numbers = np.random.default_rng(1)
        first, second, weights = (numbers.standard_normal((rows, 3)).astype(np.float32) for _ in range(3))
        a, b = say.tensor(first), say.tensor(second)
        da, db = (hp.distribute_tensor(each, mesh, [Shard(0)]) for each in (a, b))

        plain = ScaleAdd.apply(a, b, 3.0)
        out = ScaleAdd.apply(da, db, 3.0)
        right = first * np.float32(3.0) + second
        result = {
            "plain": not isinstance(plain, hp.DTensor) and close([say.numbers(plain)], [right]),
            "distributed": isinstance(out, hp.DTensor) and out.layout is da.layout,
            "shape": tuple(out.shape) == (rows, 3),
            "values": close([say.numbers(out)], [right]),
        }
        w, dw = say.tensor(weights), hp.distribute_tensor(say.tensor(weights), mesh, [Shard(0)])
        for driver in say.drivers:
            whole = say.gradients(driver, lambda x, y: (ScaleAdd.apply(x, y, 3.0) * w).sum(), a, b)
            parts = say.gradients(driver, lambda x, y: (ScaleAdd.apply(x, y, 3.0) * dw).sum(), da, db)
            result[f"gradients of plain tensors, {driver}"] = close(whole, [weights * 3, weights])
            result[f"gradients, {driver}"] = close(parts, [weights * 3, weights])
    keep_platform_groups()
    return result


def arguments(num_ranks: int) -> dict[str, bool]:
    """Numbers between tensors, tensors by keyword, lists of tensors, plain tensors mixed in: what the rule sees, and what `forward` gets."""
    from hyper_parallel import DFunction

    seen: list[Any] = []
    inside: list[Any] = []
    with rules_of_this_program():

        class SeeRule(DistributedOp):
            def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
                seen.append((list(layouts), list(extra_args)))
                return layouts[0]

        SeeRule("See")

        class See(DFunction):
            _op_name = "See"

            @staticmethod
            def forward(ctx, x, scale, others, bias=None, name="none", offset=None):
                inside.append([isinstance(each, hp.DTensor) for each in (x, *others, bias, offset)])
                ctx.scale = scale
                result = x * scale
                for each in others:
                    result = result + each
                if bias is not None:
                    result = result + bias
                return result if offset is None else result + offset

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.scale, None, None, grad, None, None

        say = words()
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        numbers = np.random.default_rng(2)
        arrays = [numbers.standard_normal((8, 2)).astype(np.float32) for _ in range(4)]
        x, first, second, bias = (hp.distribute_tensor(say.tensor(each), mesh, [Shard(0)]) for each in arrays)
        right = arrays[0] * 2 + arrays[1] + arrays[2] + arrays[3]
        offset = say.tensor(np.ones(2, np.float32))

        out = See.apply(x, 2, [first, second], bias=bias, name="some")
        result = {
            "values": close([say.numbers(out)], [right]),
            "layouts in order": seen[-1] == ([x.layout] * 4, [2, "some", None]),
            "local inside": not any(inside[-1]),
        }
        mixed = See.apply(x, 2, (first, second), bias, offset=offset)
        result["plain mixed in"] = close([say.numbers(mixed)], [right + 1])
        result["a plain tensor has no layout"] = seen[-1][0] == [x.layout] * 4 + [None]
        plain = See.apply(
            say.tensor(arrays[0]), 2, [say.tensor(arrays[1]), say.tensor(arrays[2])], bias=say.tensor(arrays[3])
        )
        result["keywords of plain tensors"] = not isinstance(plain, hp.DTensor) and close([say.numbers(plain)], [right])
        decided = len(seen)
        See.apply(x, 2, [first, second], bias=bias, name="some")
        result["decided once"] = len(seen) == decided
        for driver in say.drivers:
            found = say.gradients(
                driver, lambda a, b: See.apply(a, 2, [first, second], bias=b, name="some").sum(), x, bias
            )
            result[f"gradients by keyword, {driver}"] = close(found, [np.full((8, 2), 2.0), np.ones((8, 2))])
    keep_platform_groups()
    return result


def several_outputs(num_ranks: int) -> dict[str, bool]:
    """Two outputs with layouts and one plain; an output that is not used; an input without a gradient; a partial result and a replicated input."""
    from hyper_parallel import DFunction

    with rules_of_this_program():

        class PartsRule(DistributedOp):
            def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
                return layouts[0], layouts[0], None

        PartsRule("Parts")

        class Parts(DFunction):
            _op_name = "Parts"

            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x * y, x + y, x.sum()

            @staticmethod
            def backward(ctx, first, second, third):
                _, y = ctx.saved_tensors
                return first * y + second, None

        class DotRule(DistributedOp):
            def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
                mesh = layouts[0].mesh
                return hp.Layout(mesh, ((),), ((mesh.axis_names[0], "sum"),))

        DotRule("RowsDot")

        class RowsDot(DFunction):
            """Sums of rows that are split, times a factor that all ranks have."""

            _op_name = "RowsDot"

            @staticmethod
            def forward(ctx, x, factor):
                ctx.save_for_backward(x, factor)
                return (x * factor).sum(0)

            @staticmethod
            def backward(ctx, grad):
                x, factor = ctx.saved_tensors
                return (grad * factor).reshape(1, -1) * (x * 0 + 1), (grad * x).sum(0)

        say = words()
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        numbers = np.random.default_rng(3)
        a, b = (numbers.standard_normal((8, 2)).astype(np.float32) for _ in range(2))
        x, y = (hp.distribute_tensor(say.tensor(each), mesh, [Shard(0)]) for each in (a, b))
        product, total, count = Parts.apply(x, y)
        mine = x.to_local()
        result = {
            "values": close([say.numbers(product), say.numbers(total)], [a * b, a + b]),
            "layouts": product.layout is x.layout and total.layout is x.layout,
            "an output stays plain": not isinstance(count, hp.DTensor)
            and close([say.numbers(count)], [say.numbers(mine).sum()], 1e-5),
        }
        factor = numbers.standard_normal(2).astype(np.float32)
        whole = hp.distribute_tensor(say.tensor(factor), mesh)
        dotted = RowsDot.apply(x, whole)
        result["a partial output"] = bool(dotted.layout.partial) or num_ranks == 1
        result["its value"] = close([say.numbers(dotted)], [(a * factor).sum(0)], 1e-5)
        for driver in say.drivers:
            found = say.gradients(driver, lambda p: Parts.apply(p, y)[0].sum() + Parts.apply(p, y)[1].sum(), x)
            result[f"gradients, {driver}"] = close(found, [b + 1])
            found = say.gradients(driver, lambda p, f: RowsDot.apply(p, f).sum(), x, whole)
            result[f"gradients of a partial output, {driver}"] = close(
                found, [np.broadcast_to(factor, (8, 2)), a.sum(0)], 1e-5
            )
    keep_platform_groups()
    return result


def local_keywords(num_ranks: int) -> dict[str, bool]:
    """A rule that answers keywords for the local call; the local callable itself; an `apply` of a subclass's own."""
    from hyper_parallel import DFunction

    calls: list[str] = []
    with rules_of_this_program():

        class ScaledRule(DistributedOp):
            def preprocess(self, args: Any, kwargs: Any) -> Any:
                x, y = args
                return (x.to_local(),), {"y": y.to_local()}, (x.layout,)

            def infer_layout(self, cache_values: Any) -> Any:
                return cache_values[0], None

        ScaledRule("Scaled")

        class Scaled(DFunction):
            _op_name = "Scaled"

            @classmethod
            def apply(cls, *args, **kwargs):
                calls.append("distributed" if any(isinstance(each, hp.DTensor) for each in args) else "local")
                return super().apply(*args, **kwargs)

            @staticmethod
            def forward(ctx, x, y):
                ctx.save_for_backward(x, y)
                return x * y

            @staticmethod
            def backward(ctx, grad):
                x, y = ctx.saved_tensors
                return grad * y, grad * x

        say = words()
        mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
        a, b = (np.random.default_rng(seed).standard_normal((8, 2)).astype(np.float32) for seed in (4, 5))
        x, y = (hp.distribute_tensor(say.tensor(each), mesh, [Shard(0)]) for each in (a, b))
        result = {
            "values": close([say.numbers(Scaled.apply(x, y))], [a * b]),
            "an apply of one's own is entered again": calls == ["distributed", "local"],
            "the local callable takes keywords": close(
                [say.numbers(Scaled._get_local_callable()(say.tensor(a), y=say.tensor(b)))], [a * b]
            ),
        }
        for driver in say.drivers:
            found = say.gradients(driver, lambda p, q: Scaled.apply(p, q).sum(), x, y)
            result[f"gradients, {driver}"] = close(found, [b, a])
    keep_platform_groups()
    return result


def errors(num_ranks: int) -> dict[str, str]:
    """What each mistake says."""
    from hyper_parallel import DFunction

    class Nameless(DFunction):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Ruleless(Nameless):
        _op_name = "Ruleless"

    class KeywordOnly(DFunction):
        @staticmethod
        def forward(ctx, x, *, factor):
            return x * factor

    say = words()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    plain = say.tensor(np.ones((8, 2), np.float32))
    x = hp.distribute_tensor(plain, mesh, [Shard(0)])
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            said[name] = f"{','.join(kind.__name__ for kind in type(error).__mro__)}: {error}"
        else:
            said[name] = "nothing"

    note("plain without a name", lambda: Nameless.apply(plain))
    note("no name", lambda: Nameless.apply(x))
    note("no name, nested", lambda: Nameless.apply([x]))
    note("no rule", lambda: Ruleless.apply(x))
    note("base forward", lambda: DFunction.forward(None, x))
    note("base backward", lambda: DFunction.backward(None, x))
    note("unknown keyword", lambda: Ruleless.apply(x, factor=2))
    note("keyword only", lambda: KeywordOnly.apply(plain, factor=2))
    first, second = Ruleless._get_local_callable(), Ruleless._get_local_callable()
    said["local callable"] = repr((first is second, first.name, first.__name__, "_local_callable" in vars(Nameless)))
    keep_platform_groups()
    return said
