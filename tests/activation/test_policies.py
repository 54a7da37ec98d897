"""Policies by name: which ops a matcher means, how matchers combine, what a policy answers, and what it refuses."""

from __future__ import annotations

import copy
import doctest
import pickle
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.activation_checkpoint import matchers, op_names, policies, rules
from hyper_parallel.core.activation_checkpoint.policies import (
    as_policy_fn,
    attention,
    choose,
    convolutions,
    every,
    in_module,
    larger_than,
    matmuls,
    ops,
    random_ops,
    recompute,
    save,
    swap,
)
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from support.interpreter import run_fresh

SAVE, SWAP = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_SWAP
RECOMPUTE, DEFAULT = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


@dataclass
class Context:
    """What a region tells a policy."""

    module: str = ""
    occurrence: int = 0
    op_output: Any = None
    is_recompute: bool = False


@dataclass
class Call:
    op: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    ctx: Context = field(default_factory=Context)

    def ask(self, policy: Callable[..., Any]) -> Any:
        return policy(self.ctx, self.op, *self.args, **self.kwargs)


def record(program: Callable[[], Any]) -> list[Call]:
    """The ops that a real program runs, with the results they gave."""
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = op(*args, **(kwargs or {}))
            calls.append(Call(op, args, kwargs or {}, Context(op_output=result)))
            return result

    torch.manual_seed(0)
    with Recorder():
        program()
    return calls


def matched(matcher: Callable[..., Any], program: Callable[[], Any]) -> list[str]:
    calls = record(program)
    assert calls
    return [str(call.op) for call in calls if call.ask(matcher)]


def asked(policy: Callable[..., Any], op: Any, *args: Any, **context: Any) -> Any:
    return policy(Context(**context), op, *args)


# --- the named matchers on what real programs run


@pytest.fixture(scope="module")
def programs() -> dict[str, Callable[[], Any]]:
    torch = pytest.importorskip("torch")
    from torch.nn import functional as F  # noqa: N812
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    x = torch.randn(4, 8, requires_grad=True)
    batch = torch.randn(2, 4, 8, requires_grad=True)
    image = torch.randn(1, 2, 6, 6, requires_grad=True)
    heads = torch.randn(1, 2, 16, 8, requires_grad=True)
    with_bias, without_bias = torch.nn.Linear(8, 3), torch.nn.Linear(8, 3, bias=False)
    convolution, transposed = torch.nn.Conv2d(2, 3, 3), torch.nn.ConvTranspose2d(2, 3, 3)
    half = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    quarter = torch.randn(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())

    def math_attention() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(heads, heads, heads)

    def in_inference() -> None:
        with torch.inference_mode():
            F.dropout(without_bias(F.scaled_dot_product_attention(heads, heads, heads)), 0.5)

    return {
        "linear": lambda: with_bias(x),
        "linear without bias": lambda: without_bias(batch),
        "matmul": lambda: batch @ batch.mT,
        "matrix and vector": lambda: x @ x[0],
        "einsum": lambda: torch.einsum("bij,bkj->bik", batch, batch),
        "baddbmm": lambda: torch.baddbmm(batch[:, :, :4], batch, batch.mT),
        "in place": lambda: torch.zeros(4, 4).addmm_(x.detach(), x.detach().T),
        "grouped": lambda: torch._grouped_mm(half, half),
        "float8": lambda: torch._scaled_mm(quarter, quarter.t(), one, one),
        "bilinear": lambda: F.bilinear(x, x, torch.zeros(3, 8, 8)),
        "attention": lambda: F.scaled_dot_product_attention(heads, heads, heads),
        "math attention": math_attention,
        "convolution": lambda: convolution(image),
        "transposed convolution": lambda: transposed(image),
        "dropout": lambda: F.dropout(x, 0.5),
        "rrelu": lambda: F.rrelu(x, training=True),
        "draws": lambda: (torch.rand_like(x), torch.randperm(3), torch.bernoulli(x.detach().sigmoid())),
        "elementwise": lambda: F.gelu(x.exp() + 1).softmax(-1).sum(),
        "inference": in_inference,
    }


FOUND = {
    "matmuls": {
        "linear": ["aten.addmm.default"],
        "linear without bias": ["aten.mm.default"],
        "matmul": ["aten.bmm.default"],
        "matrix and vector": ["aten.mv.default"],
        "einsum": ["aten.bmm.default"],
        "baddbmm": ["aten.baddbmm.default"],
        "in place": ["aten.addmm_.default"],
        "grouped": ["aten._grouped_mm.default"],
        "float8": ["aten._scaled_mm.default"],
        "bilinear": ["aten._trilinear.default"],
        "math attention": ["aten.bmm.default", "aten.bmm.default"],
        "inference": ["aten.linear.default"],
    },
    "attention": {
        "attention": ["aten._scaled_dot_product_flash_attention_for_cpu.default"],
        "inference": ["aten.scaled_dot_product_attention.default"],
    },
    "convolutions": {
        "convolution": ["aten.convolution.default"],
        "transposed convolution": ["aten.convolution.default"],
    },
    "random_ops": {
        "dropout": ["aten.bernoulli_.float"],
        "rrelu": ["aten.rrelu_with_noise.default"],
        "draws": ["aten.rand_like.default", "aten.randperm.default", "aten.bernoulli.default"],
        "inference": ["aten.dropout.default"],
    },
}


@pytest.mark.parametrize("name", FOUND)
def test_a_named_matcher_finds_its_ops_in_real_programs_and_no_others(name: str, programs: Any) -> None:
    matcher = getattr(hp.policies, name)
    found = {title: matched(matcher, program) for title, program in programs.items()}
    assert {title: names for title, names in found.items() if names} == FOUND[name]


def torch_ops() -> dict[str, Any]:
    torch = pytest.importorskip("torch")
    found = {}
    for registered in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = registered.partition("::")
        name, _, overload = rest.partition(".")
        if namespace == "aten":
            try:
                op = getattr(getattr(torch.ops.aten, name), overload or "default")
            except AttributeError:  # some of TorchScript's overloads cannot be reached
                continue
            found[str(op)] = op
    return found


# Each table, and how an op of its kind is called.
TABLES = {
    "matmuls": (op_names.MATMULS, r"\w*(mm|matmul|linear)_?(_v\d+)?"),
    "attention": (op_names.ATTENTION, r"\w*(attention|attn)\w*"),
    "convolutions": (op_names.CONVOLUTIONS, r"(?!\w*_reorder_)\w*conv(?!ert)\w*"),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_aten_name_of_a_table_exists(table: str) -> None:
    torch = pytest.importorskip("torch")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        pytest.skip("the tables have names that came later than this PyTorch")
    exist = {".".join(name.split(".")[:2]) for name in torch_ops()}
    assert {name for name in TABLES[table][0] if name.startswith("aten.")} - exist == set()


@pytest.mark.parametrize("table", TABLES)
def test_no_aten_op_that_is_called_like_its_kind_is_missing(table: str) -> None:
    names, pattern = TABLES[table]
    short = {".".join(name.split(".")[:2]) for name in torch_ops() if "backward" not in name}
    assert {name for name in short if re.fullmatch(pattern, name.removeprefix("aten."))} - names == set()


def test_every_name_of_mindspore_in_the_tables_exists() -> None:
    pytest.importorskip("mindspore")
    from mindspore.ops import operations
    from mindspore.ops.auto_generate import gen_ops_prim
    from mindspore.ops.operations import array_ops, math_ops, nn_ops, random_ops, sparse_ops

    exist = {
        name
        for part in (gen_ops_prim, operations, array_ops, math_ops, nn_ops, random_ops, sparse_ops)
        for name in dir(part)
    }
    tables = op_names.MATMULS | op_names.ATTENTION | op_names.CONVOLUTIONS | op_names.RANDOM
    assert {name for name in tables if "." not in name} - exist == {"flex_attention"}


@pytest.mark.parametrize(
    ("matcher", "name"),
    [
        (matmuls, "MatMul"),
        (matmuls, "BatchMatMulExt"),
        (attention, "FlashAttentionScore"),
        (convolutions, "Conv2D"),
        (random_ops, "DropoutExt"),
    ],
)
def test_operators_of_mindspore_are_matched_by_name(matcher: Any, name: str) -> None:
    assert [m for m in (matmuls, attention, convolutions, random_ops) if asked(m, name)] == [matcher]
    assert not asked(matcher, "Exp")


def test_flex_attention_is_attention() -> None:
    pytest.importorskip("torch")
    from torch._higher_order_ops.flex_attention import flex_attention

    assert asked(attention, flex_attention)
    assert not asked(matmuls, flex_attention)
    assert asked(ops(flex_attention), flex_attention)


def test_every_op_that_pytorch_tags_as_random_is_random_unless_its_dropout_is_off() -> None:
    torch = pytest.importorskip("torch")
    tagged = {op for op in torch_ops().values() if torch.Tag.nondeterministic_seeded in op.tags}
    assert len(tagged) > 50
    certain = {op for op in tagged if random_ops.of_op(op)}
    assert {op for op in torch_ops().values() if random_ops.of_op(op)} == certain
    for op in tagged - certain:
        assert random_ops.of_op(op) is None
        assert {argument.name for argument in op._schema.arguments} & {"dropout_p", "dropout"}


def test_attention_is_random_only_in_a_call_with_dropout() -> None:
    torch = pytest.importorskip("torch")
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    q = torch.ones(1, 1, 2, 2)
    assert not Call(op, (q, q, q)).ask(random_ops)
    assert not Call(op, (q, q, q, 0.0)).ask(random_ops)
    assert Call(op, (q, q, q, 0.1)).ask(random_ops)
    assert Call(op, (q, q, q), {"dropout_p": 0.1}).ask(random_ops)


def test_attention_of_another_package_is_random_with_dropout_although_it_has_no_tag() -> None:
    class Op:
        _schema = SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in ("q", "k", "v", "dropout_p")])

        def __str__(self) -> str:
            return "flash_attn._flash_attn_forward.default"

    op = Op()
    assert Call(op, (1, 2, 3, 0.5)).ask(random_ops)
    assert not Call(op, (1, 2, 3, 0.0)).ask(random_ops)


# --- by op


def test_an_op_is_named_with_or_without_overload_and_namespace() -> None:
    torch = pytest.importorskip("torch")
    mm, out = torch.ops.aten.mm.default, torch.ops.aten.mm.out
    for every_overload in (torch.ops.aten.mm, "aten.mm", "aten::mm", "mm", "torch.ops.aten.mm"):
        assert asked(ops(every_overload), mm)
        assert asked(ops(every_overload), out)
        assert not asked(ops(every_overload), torch.ops.aten.bmm.default)
    for one_overload in (mm, "aten.mm.default", "aten::mm.default"):
        assert asked(ops(one_overload), mm)
        assert not asked(ops(one_overload), out)
    assert ops(mm) == ops("aten.mm.default") != ops(torch.ops.aten.mm)


def test_an_op_of_a_library_can_be_given_as_what_defined_it() -> None:
    torch = pytest.importorskip("torch")

    @torch.library.custom_op("hp_test_policies::twice", mutates_args=(), schema="(Tensor x) -> Tensor")
    def twice(x: Any) -> Any:
        return x * 2

    assert asked(ops(twice), torch.ops.hp_test_policies.twice.default)
    assert not asked(ops(twice), torch.ops.aten.mm.default)


def test_a_primitive_of_mindspore_stands_for_its_name() -> None:
    mindspore = pytest.importorskip("mindspore")
    assert ops(mindspore.ops.MatMul()) == ops("MatMul")
    with pytest.raises(ArgumentTypeError, match="To save this op"):
        as_policy_fn(mindspore.ops.MatMul())


@pytest.mark.parametrize("text", ["", "aten.*", "aten.mm.default.x", " mm", "3mm"])
def test_a_text_that_is_no_ops_name_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="no op's name") as caught:
        ops("aten.mm", text)
    assert repr(text) in str(caught.value)


def test_the_name_of_a_function_is_refused_with_the_name_of_its_op() -> None:
    with pytest.raises(ArgumentError, match='Write "aten.mm"'):
        ops("torch.mm")


# --- by size


def test_larger_than_is_strict_and_counts_all_outputs() -> None:
    torch = pytest.importorskip("torch")
    kib = torch.zeros(256)
    for size in (1024, "1KiB"):
        assert not asked(larger_than(size), "Exp", op_output=kib)
    assert asked(larger_than(1023), "Exp", op_output=kib)
    assert asked(larger_than(3071), "Split", op_output=(kib, [kib, {"x": kib}], None, 7))
    assert not asked(larger_than(3072), "Split", op_output=(kib, [kib, {"x": kib}], None, 7))
    assert not asked(larger_than(0), "Print", op_output=None)


def test_larger_than_looks_at_metadata_only() -> None:
    torch = pytest.importorskip("torch")
    without_memory = torch.empty(1 << 40, device="meta")
    assert asked(larger_than("3TiB"), "Exp", op_output=without_memory)
    assert not asked(larger_than("4TiB"), "Exp", op_output=without_memory)


def test_larger_than_counts_a_sparse_tensor_as_dense_and_a_distributed_one_by_its_local_part() -> None:
    torch = pytest.importorskip("torch")
    assert asked(larger_than(35), "Exp", op_output=torch.eye(3).to_sparse())
    assert not asked(larger_than(36), "Exp", op_output=torch.eye(3).to_sparse())
    distributed = SimpleNamespace(nbytes=800, _local_tensor=torch.zeros(100))
    assert asked(larger_than(399), "Exp", op_output=distributed)
    assert not asked(larger_than(400), "Exp", op_output=distributed)


def test_larger_than_knows_the_tensors_of_mindspore() -> None:
    mindspore = pytest.importorskip("mindspore")
    tensor = mindspore.Tensor([1.0, 2.0], mindspore.float32)
    assert asked(larger_than(7), "Exp", op_output=tensor)
    assert not asked(larger_than(8), "Exp", op_output=tensor)


def test_a_size_that_is_none_is_refused_in_the_words_of_the_call() -> None:
    with pytest.raises(ArgumentError, match="larger_than is no size"):
        larger_than("1 potato")
    with pytest.raises(ArgumentTypeError, match="larger_than is no size"):
        larger_than(1.5)  # type: ignore[arg-type]


# --- by module


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("layers.*.mlp", ["layers.3.mlp", "layers.3.mlp.gate.act"], ["", "layers", "layers.3", "layers.3.mlp2", "a.layers.3.mlp", "layers.3.x.mlp"]),
        ("layers", ["layers", "layers.0"], ["layers2", "", "x.layers"]),
        ("**.mlp", ["mlp", "layers.3.mlp", "a.b.c.mlp.d"], ["", "mlps", "layers.3"]),
        ("layers.**.up", ["layers.up", "layers.3.mlp.up", "layers.3.up.x"], ["layers", "up", "layers.3.mlp"]),
        ("layers.[02]", ["layers.0", "layers.2.mlp"], ["layers.1", "layers.02"]),
        ("l?", ["l1", "l1.x"], ["l", "l12", "l.1"]),
        ("**", ["", "a", "a.b"], []),
        ("*", ["a", "a.b"], [""]),
        ("Head", ["Head"], ["head"]),
    ],
)  # fmt: skip
def test_a_pattern_matches_a_module_and_everything_inside(pattern: str, inside: list[str], outside: list[str]) -> None:
    for path in [*inside, *outside]:
        assert asked(in_module(pattern), "Exp", module=path) == (path in inside), path


def test_several_patterns_match_where_one_of_them_does() -> None:
    both = in_module("head", "layers.*.mlp")
    assert [asked(both, "Exp", module=path) for path in ("head", "layers.1.mlp", "layers.1")] == [True, True, False]


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a."])
def test_a_pattern_with_an_empty_part_is_refused(pattern: str) -> None:
    with pytest.raises(ArgumentError, match="empty part") as caught:
        in_module("ok", pattern)
    assert repr(pattern) in str(caught.value)


def test_in_module_needs_texts() -> None:
    with pytest.raises(ArgumentError, match="needs a pattern"):
        in_module()
    with pytest.raises(ArgumentTypeError, match=r"no text.*\n.*7 \(int\)"):
        in_module(7)  # type: ignore[arg-type]


# --- by count


def test_every_counts_occurrences_and_nothing_else() -> None:
    second = every(3, of=matmuls, offset=1)
    for _ in range(2):  # asking again changes nothing
        assert [i for i in range(8) if asked(second, "MatMul", occurrence=i)] == [1, 4, 7]
    assert not any(asked(second, "Exp", occurrence=i) for i in range(8))
    assert [i for i in range(5) if asked(save(every(2, of=matmuls)), "MatMul", occurrence=i) is SAVE] == [0, 2, 4]
    assert all(asked(save(every(1, of=matmuls)), "MatMul", occurrence=i) is SAVE for i in range(3))


@pytest.mark.parametrize(("n", "offset"), [(0, 0), (-1, 0), (2, 2), (2, -1)])
def test_every_refuses_what_could_never_match(n: int, offset: int) -> None:
    with pytest.raises(ArgumentError):
        every(n, of=matmuls, offset=offset)


def test_every_takes_integers() -> None:
    for n in (2.0, True, "2"):
        with pytest.raises(ArgumentTypeError, match="`n` of `every` is no integer"):
            every(n, of=matmuls)  # type: ignore[arg-type]


# --- algebra


def is_in_the_head(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return bool(ctx.module == "head")


def random_matcher(rng: random.Random, depth: int) -> Any:
    if depth == 0:
        return rng.choice(
            [
                matmuls,
                attention,
                random_ops,
                ops("MatMul", "Exp"),
                larger_than(rng.choice([0, 8, 64])),
                in_module(rng.choice(["layers.*", "**.mlp", "head"])),
                every(rng.choice([1, 2]), of=matmuls),
                matmuls & is_in_the_head,
            ]
        )
    kind = rng.randrange(3)
    first = random_matcher(rng, depth - 1)
    if kind == 0:
        return ~first
    second = random_matcher(rng, rng.randrange(depth))
    return first & second if kind == 1 else first | second


def random_call(rng: random.Random) -> Call:
    context = Context(
        module=rng.choice(["", "head", "layers.1", "layers.1.mlp", "x.mlp.y"]),
        occurrence=rng.randrange(4),
        op_output=[SimpleNamespace(nbytes=rng.choice([0, 8, 9, 64, 65]))],
    )
    return Call(rng.choice(["MatMul", "Exp", "FlashAttentionScore", "Dropout", "Add"]), ctx=context)


@pytest.mark.parametrize("seed", range(40))
def test_matchers_obey_boolean_algebra(seed: int) -> None:
    rng = random.Random(seed)
    a, b, c = (random_matcher(rng, rng.randrange(4)) for _ in range(3))
    same = {
        "De Morgan, and": (~(a & b), ~a | ~b),
        "De Morgan, or": (~(a | b), ~a & ~b),
        "distributive": (a & (b | c), (a & b) | (a & c)),
        "double negation": (~~a, a),
        "absorption": (a | (a & b), a),
    }
    for _ in range(60):
        call = random_call(rng)
        values = [call.ask(matcher) for matcher in (a, b)]
        assert all(isinstance(value, bool) for value in values)
        assert call.ask(a & b) == (values[0] and values[1]), (seed, a, b, call)
        assert call.ask(a | b) == (values[0] or values[1]), (seed, a, b, call)
        assert call.ask(~a) == (not values[0]), (seed, a, call)
        for law, (left, right) in same.items():
            assert call.ask(left) == call.ask(right), (law, seed, left, right, call)


@pytest.mark.parametrize("seed", range(40))
def test_what_an_op_alone_tells_holds_for_every_call_of_it(seed: int) -> None:
    rng = random.Random(seed)
    matcher = random_matcher(rng, 3)
    for _ in range(100):
        call = random_call(rng)
        known = matcher.of_op(call.op)
        assert known in (None, call.ask(matcher)), (seed, matcher, call)


def test_what_an_op_alone_decides_is_not_asked_again() -> None:
    def never(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        raise AssertionError(f"asked about {op}")

    policy = choose(
        save(matmuls & never), save(every(2, of=never & matmuls)), swap(never | ops("Exp")), otherwise=RECOMPUTE
    )  # fmt: skip
    assert asked(policy, "Exp") is SWAP
    with pytest.raises(AssertionError, match="asked about Add"):
        asked(policy, "Add")
    plain = choose(save(matmuls), swap(attention))
    asked(plain, "Add")
    assert plain.by_op._known == {"Add": ((), DEFAULT)}


@pytest.mark.parametrize("seed", range(40))
def test_a_policy_answers_by_its_first_matching_rule(seed: int) -> None:
    rng = random.Random(seed)
    given = [
        (random_matcher(rng, rng.randrange(3)), rng.choice(list(CheckpointPolicy))) for _ in range(rng.randrange(4))
    ]
    otherwise = rng.choice(list(CheckpointPolicy))
    policy = choose(*given, otherwise=otherwise)
    for _ in range(100):
        call = random_call(rng)
        expected = next((answer for matcher, answer in given if call.ask(matcher)), otherwise)
        assert call.ask(policy) is expected, (seed, policy, call)


def test_composition_is_flat_and_compared_by_content() -> None:
    a, b, c = matmuls, larger_than("1MiB"), in_module("head")
    assert (a & b) & c == a & (b & c)
    assert (a | b) | c == a | (b | c)
    assert a & b != a | b
    assert a & b != b & a
    assert larger_than(1024) == larger_than("1KiB") != larger_than("2KiB")
    assert len({a & b, a & larger_than(2**20), ~a, ~(~~a)}) == 2
    assert ops("aten.mm", "aten.exp") == ops("aten.exp", "aten.mm")
    assert save(a) == save(a) != swap(a)
    assert hash(choose(save(a), swap(b))) == hash(choose(save(a), swap(b)))
    assert save(a) != choose((a, True), otherwise=True)


def test_a_users_function_takes_part_on_either_side() -> None:
    for matcher in (matmuls & is_in_the_head, is_in_the_head & matmuls):
        assert asked(matcher, "MatMul", module="head")
        assert not asked(matcher, "MatMul", module="tail")
        assert not asked(matcher, "Exp", module="head")
    for matcher in (matmuls | is_in_the_head, is_in_the_head | matmuls):
        assert asked(matcher, "Exp", module="head")
        assert not asked(matcher, "Exp", module="tail")
    assert asked(swap(is_in_the_head), "Exp", module="head") is SWAP
    assert repr(is_in_the_head & matmuls | ops("Exp")) == '(is_in_the_head & matmuls) | ops("Exp")'


def test_a_users_function_that_answers_with_a_policy_is_no_matcher() -> None:
    def decide(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_RECOMPUTE

    with pytest.raises(ArgumentTypeError, match=r"decide.*neither True nor False.*\n.*MUST_RECOMPUTE.*; Exp"):
        asked(save(decide), "Exp")


@pytest.mark.parametrize("use", [bool, lambda m: m and attention, lambda m: m or attention, lambda m: not m])
def test_a_matcher_has_no_truth_value(use: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="`&`, `\\|` and `~`"):
        use(matmuls)


# --- policies


def test_choose_takes_the_first_rule_and_any_answer() -> None:
    torch_like = pytest.importorskip("torch.utils.checkpoint").CheckpointPolicy
    policy = choose(
        swap(attention),
        save(matmuls & in_module("head")),
        recompute(in_module("head")),
        (matmuls, True),
        (ops("Exp"), torch_like.MUST_CPU_OFFLOAD),
        otherwise=False,
    )
    answers = {
        ("FlashAttentionScore", "head"): SWAP,
        ("MatMul", "head"): SAVE,
        ("Exp", "head"): RECOMPUTE,
        ("MatMul", "tail"): SAVE,
        ("Exp", "tail"): SWAP,
        ("Add", "tail"): DEFAULT,
    }
    assert {key: asked(policy, key[0], module=key[1]) for key in answers} == answers


def test_policies_nest_and_the_outer_decides_about_the_rest() -> None:
    inner = choose(save(matmuls), swap(attention))
    policy = choose(recompute(in_module("head")), inner, otherwise=CheckpointPolicy.PREFER_SAVE)
    assert asked(policy, "MatMul", module="head") is RECOMPUTE
    assert asked(policy, "MatMul") is SAVE
    assert asked(policy, "FlashAttentionScore") is SWAP
    assert asked(policy, "Exp") is CheckpointPolicy.PREFER_SAVE
    with pytest.raises(ArgumentError, match="outermost"):
        choose(policy, save(matmuls))


def test_arguments_of_an_op_may_have_any_name() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 2)
    mm, context = torch.ops.aten.mm.default, Context(op_output=x)
    kwargs = {"self": x, "ctx": x, "op": x, "mat2": x, "of": 1}

    def own(ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> bool:
        return set(kwargs) == {"self", "ctx", "op", "mat2", "of"}

    by_op = matmuls & ~attention & ~random_ops & ops("aten.mm")
    by_call = larger_than(0) & in_module("**") & every(1, of=matmuls) & own
    assert (by_op & by_call)(context, mm, **kwargs) is True
    assert (attention | by_call)(context, mm, **kwargs) is True
    assert save(by_op & by_call)(context, mm, **kwargs) is SAVE


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (choose(swap(attention), save(matmuls)), "swap attention; save matmuls; recompute the rest"),
        (choose(), "recompute everything"),
        (choose(otherwise=SAVE), "save everything"),
        (
            choose((convolutions, CheckpointPolicy.PREFER_SAVE), otherwise=SWAP),
            "prefer to save convolutions; swap the rest",
        ),
        (choose((matmuls, DEFAULT), otherwise=RECOMPUTE), "prefer to recompute matmuls; always recompute the rest"),
        (
            save(matmuls & (larger_than("1.5 MiB") | ~in_module("a.*", "b"))),
            'save matmuls & (larger_than("1.5 MiB") | ~in_module("a.*", "b")); recompute the rest',
        ),
        (recompute(is_in_the_head), "recompute is_in_the_head; recompute the rest"),
    ],
)
def test_a_policy_reads_as_a_sentence(policy: Any, text: str) -> None:
    assert repr(policy) == text


def test_different_answers_read_differently() -> None:
    answers = list(CheckpointPolicy)
    assert len({repr(choose((matmuls, answer))) for answer in answers}) == len(answers)
    assert len({repr(choose(save(matmuls), otherwise=answer)) for answer in answers}) == len(answers)


@pytest.mark.parametrize("seed", range(20))
def test_a_matchers_text_is_the_program_that_makes_it(seed: int) -> None:
    matcher = random_matcher(random.Random(seed), 4)
    if "is_in_the_head" not in repr(matcher):
        assert eval(repr(matcher), vars(policies)) == matcher  # noqa: S307
    for exact in (
        every(3, of=~(matmuls | attention), offset=2),
        larger_than(1234567),
        larger_than(2**20),
        ops("aten.mm", "Exp"),
    ):
        assert eval(repr(exact), vars(policies)) == exact  # noqa: S307


@pytest.mark.parametrize("seed", range(20))
def test_matchers_and_policies_are_pickled_and_copied(seed: int) -> None:
    rng = random.Random(seed)
    policy = choose((random_matcher(rng, 3), SAVE), (random_matcher(rng, 3), SWAP))
    calls = [random_call(rng) for _ in range(30)]
    answers = [call.ask(policy) for call in calls]  # what a policy remembers about ops must not travel
    for twin in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy), copy.copy(policy)):  # noqa: S301
        assert twin is not policy
        assert twin == policy
        assert hash(twin) == hash(policy)
        assert repr(twin) == repr(policy)
        assert [call.ask(twin) for call in calls] == answers


def test_a_policy_that_was_asked_about_ops_of_pytorch_can_be_pickled() -> None:
    torch = pytest.importorskip("torch")
    policy = as_policy_fn([torch.ops.aten.mm.default, torch.ops.aten.exp])
    assert asked(policy, torch.ops.aten.mm.default) is SAVE
    assert pickle.loads(pickle.dumps(policy)) == policy  # noqa: S301
    assert pickle.loads(pickle.dumps(matmuls)) is matmuls  # noqa: S301
    assert copy.deepcopy(random_ops) is random_ops


# --- what a user may give


def test_a_list_saves_its_ops_and_recomputes_the_rest() -> None:
    torch = pytest.importorskip("torch")
    aten = torch.ops.aten
    for kind in (list, tuple, set, frozenset):
        policy = as_policy_fn(kind([aten.mm.default, aten.addmm, "aten.exp"]))
        saved = [aten.mm.default, aten.addmm.default, aten.addmm.out, aten.exp.default]
        assert [asked(policy, op) for op in saved] == [SAVE] * 4
        assert [asked(policy, op) for op in (aten.mm.out, aten.bmm.default, aten.exp_.default)] == [DEFAULT] * 3
    assert asked(as_policy_fn(["MatMul"]), "MatMul") is SAVE
    assert asked(as_policy_fn(["MatMul"]), "BatchMatMul") is DEFAULT
    assert asked(as_policy_fn([]), "MatMul") is DEFAULT


def test_a_list_asks_for_the_name_of_an_op_once() -> None:
    names = 0

    class Op:
        def __str__(self) -> str:
            nonlocal names
            names += 1
            return "library.op.default"

    op = Op()
    policies_of_lists = [as_policy_fn(["library.op"]), as_policy_fn(["aten.mm"])]
    for _ in range(5):
        assert [asked(policy, op) for policy in policies_of_lists] == [SAVE, DEFAULT]
    assert names == 1


def test_functions_policies_and_none_are_taken_as_they_are() -> None:
    policy = save(matmuls)
    assert as_policy_fn(is_in_the_head) is is_in_the_head
    assert as_policy_fn(policy) is policy
    assert as_policy_fn(None) == choose()
    assert asked(as_policy_fn(None), "MatMul") is DEFAULT


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (matmuls, "does not say what to do: write save(matmuls) or swap(matmuls)"),
        ("aten.mm", "write ['aten.mm']"),
        (CheckpointPolicy.MUST_SWAP, "choose(otherwise=CheckpointPolicy.MUST_SWAP)"),
        (True, "choose(otherwise=CheckpointPolicy.MUST_SAVE)"),
        (7, "7 (int)"),
        ({"aten.mm": 1}, "{'aten.mm': 1} (dict)"),
        (dict, "<class 'dict'>"),
    ],
)
def test_what_is_no_policy_is_refused_with_what_to_write(given: Any, says: str) -> None:
    with pytest.raises(ArgumentTypeError, match="This is no policy") as caught:
        as_policy_fn(given)
    assert says in str(caught.value)


def test_an_op_alone_is_no_policy_although_it_can_be_called() -> None:
    torch = pytest.importorskip("torch")
    from torch._higher_order_ops.flex_attention import flex_attention

    for op in (torch.ops.aten.mm.default, torch.ops.aten.mm, flex_attention):
        with pytest.raises(ArgumentTypeError, match="To save this op"):
            as_policy_fn(op)
        with pytest.raises(ArgumentTypeError, match=r"Write ops\("):
            save(op)
        with pytest.raises(ArgumentTypeError, match=r"Write ops\("):
            _ = matmuls | op


def test_an_entry_of_a_list_that_is_no_op_is_shown() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ArgumentTypeError, match=r"`mm` is a function.*torch.ops.aten.mm"):
        as_policy_fn([torch.ops.aten.bmm, torch.mm])
    with pytest.raises(ArgumentTypeError, match=r"This is no op.\n.*7 \(int\)"):
        as_policy_fn(["aten.mm", 7])
    with pytest.raises(ArgumentTypeError, match="This is no op.\n.*Linear"):
        as_policy_fn([torch.nn.Linear])
    with pytest.raises(ArgumentTypeError, match="matcher or a policy in it.\n.*matmuls"):
        as_policy_fn(["aten.mm", matmuls])
    with pytest.raises(ArgumentError, match="no op's name"):
        as_policy_fn(["aten.*"])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("layers.*", "Write ops('layers.*') (or in_module('layers.*') for a module)"),
        (save(matmuls), "Combine policies with choose"),
        (dict, "in_module"),
        (["aten.mm"], "Write ops(*these)"),
        (None, "got None"),
        (7, "7 (int)"),
    ],
)
def test_what_is_no_matcher_is_refused_with_what_to_write(given: Any, says: str) -> None:
    for use in (save, swap, recompute, lambda x: every(2, of=x), lambda x: matmuls & x, lambda x: x | matmuls):
        with pytest.raises(ArgumentTypeError, match="This is no matcher") as caught:
            use(given)
        assert says in str(caught.value)


def test_what_is_no_rule_and_no_answer_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match=r"This is no rule.*\n.*\nWrite save\(matmuls\)"):
        choose(matmuls)
    with pytest.raises(ArgumentTypeError, match="This is no rule"):
        choose((matmuls, SAVE, SWAP))
    with pytest.raises(ArgumentTypeError, match="means nothing.\n.*'save'"):
        choose((matmuls, "save"))
    with pytest.raises(ArgumentTypeError, match="means nothing.\n.*None"):
        choose(otherwise=None)


# --- the module


def test_the_policies_are_public_and_load_no_framework() -> None:
    program = """
import hyper_parallel as hp
policy = hp.policies.choose(hp.policies.swap(hp.policies.attention), hp.policies.save(hp.policies.ops("MatMul")))
loaded = sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "mindspore", "numpy"})
result = [repr(policy), hp.policies.__name__, loaded]
"""
    assert run_fresh(program) == [
        'swap attention; save ops("MatMul"); recompute the rest',
        "hyper_parallel.core.activation_checkpoint.policies",
        [],
    ]


def test_every_public_name_exists_and_the_examples_run() -> None:
    names = {name: getattr(hp.policies, name) for name in policies.__all__}
    for module, at_least in ((policies, 5), (matchers, 5), (rules, 1)):
        results = doctest.testmod(module, globs={**names, "CheckpointPolicy": CheckpointPolicy})
        assert results.failed == 0
        assert results.attempted >= at_least
