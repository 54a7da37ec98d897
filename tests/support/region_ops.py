"""The ops of random region programs: each takes two square tensors and gives one, and stands for one thing that can go wrong.

An op is the same function at every call: what it chooses comes from the generator that it is given, what it draws from PyTorch's
generators. It changes in place what is fresh, buffers, or what the program says; so it is legal in plain PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional

SIZE = 6
NUM_ROWS = 5  # of the table of embeddings

Op = Callable[["State", random.Random, Tensor, Tensor], Tensor]
OPS: dict[str, Op] = {}
FEATURE: dict[str, str] = {}  # of each op
DIFFERENTIABLE_TWICE: set[str] = set()


def op(feature: str, *, twice: bool = True) -> Callable[[Op], Op]:
    def register(function: Op) -> Op:
        OPS[function.__name__] = function
        FEATURE[function.__name__] = feature
        if twice:
            DIFFERENTIABLE_TWICE.add(function.__name__)
        return function

    return register


class Cache:
    """What a model hands around to grow: a list of tensors in a python object."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.num_appended = 0

    def append(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        self.num_appended += 1

    def joined(self) -> Tensor:
        return torch.cat(self.tensors)


class State:
    """Leaves, weights, modules with buffers and a generator, the same for every run of a seed."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        numbers = torch.Generator().manual_seed(seed)

        def new(*size: int) -> Tensor:
            return torch.randn(*size, generator=numbers).to(dtype)

        self._inputs = [[new(SIZE, SIZE).requires_grad_(index != 1) for index in range(3)] for _ in range(2)]
        self.weight = nn.Parameter(new(SIZE, SIZE) * 0.5)
        self.bias = nn.Parameter(new(SIZE))
        self.table = nn.Parameter(new(NUM_ROWS, SIZE))
        self.kernel = nn.Parameter(new(SIZE, SIZE, 3) * 0.3)
        self.norm = nn.LayerNorm(SIZE, dtype=dtype)
        self.batch_norm = nn.BatchNorm1d(SIZE, dtype=dtype)
        self.tied = nn.Linear(SIZE, SIZE, dtype=dtype, device="meta")
        self.tied.weight, self.tied.bias = self.weight, self.bias
        self.dropout = nn.Dropout(0.25)
        self.steps = torch.zeros((), dtype=torch.int64)
        self.generator = torch.Generator().manual_seed(seed + 1)
        self._weights = new(SIZE, SIZE)
        self.statics = [torch.full((SIZE, SIZE), 0.5, dtype=dtype) for _ in range(2)]  # regions write rows of them

    def inputs(self, number: int) -> list[Tensor]:
        return list(self._inputs[number])

    def leaves(self) -> list[tuple[str, Tensor]]:
        inputs = [
            (f"input {index} of forward {number}", tensor)
            for number, tensors in enumerate(self._inputs)
            for index, tensor in enumerate(tensors)
            if tensor.requires_grad
        ]
        names = ("weight", "bias", "table", "kernel")
        norms = [(f"norm.{name}", parameter) for name, parameter in self.norm.named_parameters()]
        norms += [(f"batch_norm.{name}", parameter) for name, parameter in self.batch_norm.named_parameters()]
        return [*inputs, *((name, getattr(self, name)) for name in names), *norms]

    def buffers(self) -> list[tuple[str, Tensor]]:
        statics = [(f"static {index}", tensor) for index, tensor in enumerate(self.statics)]
        return [("steps", self.steps), *self.batch_norm.named_buffers(), *statics]

    def loss(self, tensors: list[Tensor], *, bounded: bool = False) -> Tensor:
        """A scalar of all of them that always depends on a leaf."""
        total = (self._inputs[0][0] * self._weights).sum()
        for index, tensor in enumerate(tensors):
            value = tensor.sin() if bounded else tensor
            weights = self._weights if value.shape == self._weights.shape else torch.ones_like(value)
            total = total + (value * weights).sum() * (1 / (index + 1))
        return total


# -- ordinary ops -----------------------------------------------------------------------------------------------------------


@op("elementwise ops")
def sine(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * r.choice((0.5, 2.0))


@op("elementwise ops")
def product(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return (a * b).tanh()


@op("elementwise ops")
def bell(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-a * a) - b.sigmoid()


@op("elementwise ops")
def gelu(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.gelu(a.tanh())


@op("elementwise ops")
def softmax(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.softmax(a, r.randrange(2)) + b.cos()


@op("matrix products")
def matmul(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b)


@op("matrix products")
def einsum(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("ij,kj->ik", a, b).sigmoid()


@op("convolution")
def convolution(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.conv1d(a[None], s.kernel, padding=1)[0].tanh()


@op("a weight")
def linear(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.linear(a, s.weight, s.bias).tanh()


@op("tied weights")
def tied(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.linear(functional.linear(a, s.weight).sin(), s.weight.t()).tanh()


@op("tied weights")
def tied_module(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.silu(s.tied(a).tanh())


@op("embedding")
def embedding(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    rows = (b[:, 0].abs() * 3).long().clamp(0, NUM_ROWS - 1)
    return functional.embedding(rows, s.table).tanh() * a.cos()


@op("a loss inside")
def cross_entropy(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    target = b.argmax(1)
    return a.sin() * functional.cross_entropy(a.tanh(), target)


# -- randomness -------------------------------------------------------------------------------------------------------------


@op("dropout")
def dropout(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.dropout(a, r.choice((0.2, 0.5))).sin()


@op("dropout")
def dropout_module(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return s.dropout(a.tanh()) * s.dropout(b.tanh())


@op("an explicit generator")
def explicit_generator(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    kept = torch.rand(SIZE, SIZE, generator=s.generator, dtype=s.dtype) > 0.3
    return a.sin() * kept


@op("an explicit generator")
def explicit_normal(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    noise = torch.empty_like(a).normal_(generator=s.generator)
    return (a * noise).tanh()


@op("random numbers inside")
def noise(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return (a * torch.rand_like(a)).sin() + b * torch.randn(SIZE, dtype=s.dtype).tanh()


@op("random numbers inside")
def permutation(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a[torch.randperm(SIZE)].sin()


@op("random numbers inside")
def bernoulli(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * torch.bernoulli(a.detach().sigmoid())


@op("random numbers decide a branch")
def random_branch(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() if torch.rand(()).item() < 0.5 else (a * b).tanh()


# -- views ------------------------------------------------------------------------------------------------------------------


@op("a slice")
def slices(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a[1:4].sin(), a[::2] * b[1::2].cos()])


@op("a slice")
def row(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a[:, r.randrange(SIZE)].sin().unsqueeze(1) * b.tanh()


@op("transpose")
def transpose(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.t() if r.random() < 0.5 else a.transpose(0, 1).sin()


@op("expand")
def expand(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    view = a[r.randrange(SIZE)].expand(SIZE, SIZE)
    return view if r.random() < 0.5 else view.sin() * b.tanh()


@op("as_strided")
def as_strided(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    fresh = a.sin()
    return fresh.as_strided((SIZE, SIZE), (1, SIZE)) * fresh.as_strided((SIZE, SIZE), (2, 3), 1)


@op("chunk and split")
def chunk(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    first, second = a.chunk(2, 0)
    return torch.cat([second.sin() * first, first.sigmoid()])


@op("chunk and split")
def split(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = functional.linear(a, torch.cat([s.weight, s.weight, s.weight])).split(SIZE, 1)
    return ((q.tanh() @ k.tanh().t()).softmax(-1) @ v).tanh()


@op("chunk and split")
def unbind(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([part.cos() if i % 2 else part.tanh() for i, part in enumerate(a.unbind(r.randrange(2)))])


@op("a view of another shape")
def other_shape(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.contiguous().view(4, 9).sin().view(2, 18).softmax(1).view(SIZE, SIZE)


@op("a view of another shape")
def diagonal(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.tanh() * b.diagonal().sin() + a.flatten()[:SIZE].cos()


# -- in place ---------------------------------------------------------------------------------------------------------------


@op("in place on what is fresh")
def relu_in_place(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return functional.linear(a, s.weight, s.bias).relu_().tanh()


@op("in place on what is fresh")
def add_to_clone(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    copy = a.clone()
    copy.add_(b, alpha=0.5)
    return copy.sin_() if r.random() < 0.3 and not copy.requires_grad else copy.sin()


@op("in place on what is fresh")
def chain_in_place(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    fresh = a * 0.5
    fresh.add_(b)
    fresh.sigmoid_()
    return fresh


@op("in place on what is fresh")
def fill_in_place(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    fresh = torch.empty_like(a)
    fresh.copy_(b)
    return fresh.masked_fill_(a > 0, 0.25).tanh()


@op("index writes")
def write_mask(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    copy = a.clone()
    copy[b > 0] = 0.5
    copy[1] = b[0].sin()
    return copy.sin()


@op("index writes")
def write_slice(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    copy = a * 2.0
    copy[::2].mul_(0.25)
    copy[:, 1:3] = b[:, :2]
    return copy.tanh()


@op("index writes")
def write_rows(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros_like(a)
    out.index_copy_(0, torch.arange(SIZE).flip(0), a.sin())
    return out.index_put_((torch.tensor([0, 2]), torch.tensor([1, 3])), b[0, :2]).tanh()


@op("in place without gradient")
def write_without_gradient(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        mask = torch.ones_like(a)
        mask.triu_()
        mask[0].zero_()
    return a.sin() * mask


# -- buffers ----------------------------------------------------------------------------------------------------------------


@op("a batch norm that trains")
def batch_norm(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return s.batch_norm(a).tanh()


@op("a counter in a buffer")
def counter(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    s.steps.add_(1)
    return a.sin() * s.steps.to(s.dtype).rsqrt()


# -- indices and branches ---------------------------------------------------------------------------------------------------


@op("nonzero")
def nonzero(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    flat = a.reshape(-1)
    chosen = (flat > 0).nonzero().squeeze(1)
    return torch.zeros_like(flat).index_add(0, chosen, flat[chosen].sin()).view(SIZE, SIZE)


@op("topk and sort")
def topk(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.topk(3, 1)
    return torch.cat([values.sin(), values.flip(1)], 1).tanh() + indices.to(s.dtype).sum() * 0.01


@op("topk and sort")
def sort(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sort(1).values.sin() * b.gather(1, a.argsort(1)).tanh()


@op("topk and sort")
def maximum(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    values, indices = a.max(1, keepdim=True)
    return (a - values).exp() * (indices > 2)


@op("where")
def where(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a > b, a.sin(), b.tanh())


@op("a boolean mask")
def mask(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    chosen = a[a > 0]
    return b.sin() * chosen.sin().mean() if chosen.numel() else b.cos()


@op("gather and index_add")
def gather(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.gather(0, b.argsort(0)).sin()


@op("gather and index_add")
def index_add(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    rows = b[:, 0].argsort() // 2
    return torch.zeros_like(a).index_add(0, rows, a.sin()).tanh()


@op("gather and index_add")
def scatter(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.tanh().scatter_add(1, (b > 0).long(), b.cos())


@op("a branch on item()")
def branch_on_item(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() if a.sum().item() > 0 else (a @ b).tanh()


@op("a branch on item()")
def scalar_from_item(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a * (1 / (1 + a.detach().abs().max().item()))


@op("a branch on bool()")
def branch_on_bool(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return (a * b).tanh() if (a > b).all() or bool(a[0, 0] > 0) else a.cos()


@op("a branch on tolist()")
def branch_on_list(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    for value in a[0].tolist()[:2]:
        a = a.sin() if value > 0 else a.tanh() * b
    return a


# -- several outputs --------------------------------------------------------------------------------------------------------


@op("layer norm")
def layer_norm(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return s.norm(a).tanh()


@op("several outputs")
def var_mean(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    var, mean = torch.var_mean(a, 1, keepdim=True)
    return ((a - mean) * (var + 1).rsqrt()).tanh()


@op("several outputs")
def one_of_several(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    low, _ = a.sin().aminmax(dim=1)
    return b.tanh() * low.unsqueeze(1)


@op("attention", twice=False)
def attention(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (t.reshape(1, 2, 3, SIZE) for t in (a, b, a))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=r.random() < 0.5).reshape(SIZE, SIZE)


@op("attention with dropout", twice=False)
def attention_with_dropout(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (t.reshape(1, 1, SIZE, SIZE) for t in (a, b, a))
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)[0, 0].tanh()


@op("attention with dropout", twice=False)
def attention_with_mask(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (t.reshape(1, 1, SIZE, SIZE) for t in (a, b, a))
    bias = torch.zeros(SIZE, SIZE, dtype=s.dtype).masked_fill(torch.ones(SIZE, SIZE).triu(1).bool(), -1e4)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.2)[0, 0].tanh()


# -- gradient modes and functions -------------------------------------------------------------------------------------------


@op("a part without gradient")
def part_without_gradient(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (a.sin().abs().max() + 1).rsqrt()
    return a.tanh() * scale


@op("detach")
def detach(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.detach().sin() * b.tanh()


class SavesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(a)
        ctx.factor = factor
        return a.sin() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a,) = ctx.saved_tensors
        return grad * a.cos() * ctx.factor, None


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        out = a.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class SavesIntermediate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        inner = a.cos()
        ctx.save_for_backward(inner, a, b)
        return inner * b, a.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        inner, a, b = ctx.saved_tensors
        return other * inner - grad * a.sin() * b, grad * inner


class ChangesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.mark_dirty(a)
        a.exp_()
        ctx.save_for_backward(a)
        return a

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        return grad * a


@op("a function that saves its input")
def function_of_input(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return SavesInput.apply(a, r.choice((0.5, 1.5)))


@op("a function that saves its output")
def function_of_output(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return SavesOutput.apply(a)


@op("a function that saves an intermediate", twice=False)
def function_of_intermediate(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    first, second = SavesIntermediate.apply(a, b.tanh())
    return first + second if r.random() < 0.7 else first


@op("a function that marks its input dirty")
def function_in_place(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return ChangesItsInput.apply(a.tanh() * 0.5).sin()


@op("PyTorch's own checkpoint inside")
def checkpoint_of_pytorch(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x, y: (x.sin() * y).tanh(), a, b, use_reentrant=False)


# -- dtypes and sizes -------------------------------------------------------------------------------------------------------


@op("a part under autocast", twice=False)
def part_under_autocast(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (functional.linear(a, s.weight).relu() @ b).to(s.dtype).tanh()


@op("complex numbers")
def complex_numbers(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    z = torch.complex(a.float(), b.float())
    return (z * z.conj() + z.conj().sin().mean()).real.tanh() + z.imag.cos()


@op("another float type")
def other_float(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return (a.to(torch.float64 if s.dtype is torch.float32 else torch.float32).sin() * 0.5).to(s.dtype)


@op("empty tensors")
def empty(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    nothing = a[:0].sin()
    return torch.cat([nothing, a.tanh()]) + (nothing * b[:0]).sum()


@op("tensors without dimensions")
def scalar(s: State, r: random.Random, a: Tensor, b: Tensor) -> Tensor:
    return a.sin() * a.mean() + b[0, 0].tanh()
