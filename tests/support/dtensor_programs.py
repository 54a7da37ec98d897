"""Programs with distributed tensors that run inside the worker processes of `support.processes`, on PyTorch."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import hyper_parallel as hp
from hyper_parallel import Layout, Partial, Replicate, Shard, ShardPlan, init_device_mesh
from hyper_parallel.platform.torch.dtensor import DTensor
from support.dtensor_cases import MESHES, layouts_of
from support.process_worker import keep_all_groups, keep_platform_groups


def mesh_named(name: str) -> hp.DeviceMesh:
    shape, axes = MESHES[name]
    return init_device_mesh("cpu", shape, mesh_dim_names=axes)


# -- training -----------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.size = width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, groups * self.size, bias=False)
        self.wv = nn.Linear(width, groups * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, -1, self.size) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(1, 2) for each in (rotated(q, cosine, sine), rotated(k, cosine, sine), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 16, hidden: int = 24, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, groups)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = SwiGLU(width, hidden)

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.mlp(self.mlp_norm(x))


def rotated(x: Any, cosine: Any, sine: Any) -> Any:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)


TENSOR_PARALLEL = ShardPlan(
    parameters={
        "attention.w[qkv].weight": ("tp", None), "attention.wo.weight": (None, "tp"),
        "mlp.gate.weight": ("tp", None), "mlp.up.weight": ("tp", None), "mlp.down.weight": (None, "tp"),
    },
    outputs={"attention": (None, None, None), "mlp": (None, None, None)},
)  # fmt: skip
SEQUENCE_PARALLEL = ShardPlan(
    parameters=TENSOR_PARALLEL.parameters,
    inputs={"attention": [(None, None, None)], "mlp": (None, None, None)},
    outputs={"attention": (None, "tp", None), "mlp": (None, "tp", None)},
)


def tensor_parallel_mlp() -> dict[str, Any]:
    """Gradients beside those of one device, and what was sent."""
    mesh = mesh_named("2")
    plain = MLP()
    sharded = hp.shard_module(
        copy.deepcopy(plain), mesh,
        ShardPlan(parameters={"up.*": ("tp",), "up.weight": ("tp", None), "down.weight": (None, "tp")}, outputs={"": (None, None)}),
    )  # fmt: skip
    x = torch.randn(5, 6, requires_grad=True)
    plain(x).square().sum().backward()
    mine = hp.distribute_tensor(x.detach(), mesh).requires_grad_()
    with hp.comm_debug() as forward:
        out = sharded(mine)
    with hp.comm_debug() as backward:
        out.square().sum().backward()
    keep_platform_groups()
    return {
        "difference": max(_differences(plain, sharded).values()),
        "input": (mine.grad.full_tensor() - x.grad).abs().max().item(),
        "forward": forward.counts(), "backward": backward.counts(),
        "why": sorted({each.why for each in (*forward.entries, *backward.entries)}), "text": str(forward),
    }  # fmt: skip


def llama_block(is_sequence_parallel: bool, num_ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    plain = LlamaBlock(groups=max(2, num_ranks))  # each rank has its own key heads
    plan = SEQUENCE_PARALLEL if is_sequence_parallel else TENSOR_PARALLEL
    sharded = hp.shard_module(copy.deepcopy(plain), mesh, plan)
    x = torch.randn(2, 8, 16, requires_grad=True)
    angle = torch.randn(1, 8, 1, 2)
    plain(x, angle.cos(), angle.sin()).square().sum().backward()
    where = mesh.layout(None, "tp" if is_sequence_parallel else None, None)
    mine = hp.distribute_tensor(x.detach(), where).requires_grad_()
    inputs = [hp.distribute_tensor(each, mesh) for each in (angle.cos(), angle.sin())]
    with hp.comm_debug() as forward:
        out = sharded(mine, *inputs)
    with hp.comm_debug() as backward:
        out.square().sum().backward()
    keep_platform_groups()
    return {
        "difference": max(_differences(plain, sharded).values()),
        "input": (mine.grad.full_tensor() - x.grad).abs().max().item(),
        "forward": forward.counts(), "backward": backward.counts(),
    }  # fmt: skip


def _differences(plain: nn.Module, sharded: nn.Module) -> dict[str, float]:
    right = dict(plain.named_parameters())
    found = {}
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter, nn.Parameter)
        scale = max(right[name].grad.abs().max().item(), 1.0)
        found[name] = (parameter.grad.full_tensor() - right[name].grad).abs().max().item() / scale
    return found


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "Adam foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}


def trained(optimizer: str, clip: bool) -> float:
    """The largest difference of parameters after some steps on a 2x2 mesh, sharded both ways, beside one device."""
    mesh = mesh_named("2x2")
    plain = MLP()
    plan = ShardPlan(
        parameters={"up.weight": ("tp", "dp"), "up.bias": ("tp",), "down.weight": (("dp", "tp"), None)},
        inputs={"": ("dp", None)},
    )
    sharded = hp.shard_module(copy.deepcopy(plain), mesh, plan)
    steps = [OPTIMIZERS[optimizer](list(module.parameters())) for module in (plain, sharded)]
    platform = hp.get_torch_platform()
    for _ in range(4):
        x = torch.randn(6, 6)
        norms = []
        for module, step in zip((plain, sharded), steps, strict=True):
            step.zero_grad()
            module(x).square().mean().backward()
            if clip:
                norms.append(float(platform.clip_grad_norm_(module, 0.05)))
            step.step()
        if clip:
            assert abs(norms[0] - norms[1]) < 1e-6 * norms[0], norms
    keep_platform_groups()
    right = dict(plain.named_parameters())
    return max((p.full_tensor() - right[name]).abs().max().item() for name, p in sharded.named_parameters())


# -- redistribution -----------------------------------------------------------------------------------------------------


def random_redistributions(mesh_name: str, shape: tuple[int, ...], seed: int, count: int) -> int:
    """Random pairs of layouts: the values, and the gradient of a sum with random weights."""
    mesh = mesh_named(mesh_name)
    choice = random.Random(seed)
    torch.manual_seed(seed)
    layouts = sorted(set(layouts_of(mesh, len(shape), True)), key=repr)
    for _ in range(count):
        source, target = choice.choice(layouts), choice.choice(layouts)
        x, weights = torch.randn(shape), torch.randn(shape)
        start = hp.distribute_tensor(x, source).detach().requires_grad_()
        moved = start.redistribute(target)
        assert moved.layout is target
        where = f"{source} -> {target}"
        assert torch.allclose(moved.full_tensor(), x, rtol=0, atol=1e-6), where
        (moved * hp.distribute_tensor(weights, mesh)).sum().backward()
        assert torch.allclose(start.grad.full_tensor(), weights, rtol=0, atol=1e-6), where
    keep_platform_groups()
    return count


# -- the tensor itself --------------------------------------------------------------------------------------------------


def one_stream_of_random_numbers() -> list[bool]:
    """Factories on three meshes draw what one device draws, and leave the generator where it leaves it."""
    found = []
    for name in ("4", "2x2"):
        mesh = mesh_named(name)
        layout = mesh.layout(mesh.axis_names, None)
        for ours, theirs in ((hp.rand, torch.rand), (hp.randn, torch.randn)):
            torch.manual_seed(5)
            mine = ours((6, 3), layout)
            after = torch.rand(3)
            torch.manual_seed(5)
            found.append(torch.equal(mine.full_tensor(), theirs(6, 3)) and torch.equal(after, torch.rand(3)))
    keep_platform_groups()
    return found


def dropout_by_part() -> dict[str, Any]:
    """Replicas draw the same numbers, parts draw others, and the gradient has the mask of the value."""
    mesh = mesh_named("2x2")
    x = hp.distribute_tensor(torch.ones(8, 64), mesh.layout("dp", None)).requires_grad_()
    torch.manual_seed(3)
    y = F.dropout(x, 0.5)
    after = torch.rand(2).tolist()
    y.sum().backward()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (y.to_local().detach(), after))
    keep_platform_groups()
    parts, states = [each[0] for each in everyone], [each[1] for each in everyone]
    return {
        "replicas agree": torch.equal(parts[0], parts[1]) and torch.equal(parts[2], parts[3]),
        "parts differ": not torch.equal(parts[0], parts[2]),
        "generators agree": all(state == states[0] for state in states),
        "share": torch.stack(parts[::2]).count_nonzero().item() / (8 * 64),
        "gradient": torch.equal(x.grad.to_local(), y.to_local().detach()),
    }


def to_torch_and_back() -> dict[str, Any]:
    mesh = mesh_named("2x2")
    whole = torch.arange(20.0).reshape(5, 4)
    x = hp.distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).detach().requires_grad_()
    native = x.to_torch()
    back = DTensor.from_torch(native)
    result = {
        "same memory": native.to_local().data_ptr() == x.to_local().data_ptr() == back.to_local().data_ptr(),
        "whole": torch.equal(native.full_tensor(), whole),
        "layout": back.layout is x.layout,
        "mesh": mesh.to_torch().mesh.tolist() == [[0, 1], [2, 3]],
    }
    (native * 2).sum().full_tensor().backward()
    keep_all_groups()
    result["gradient"] = torch.equal(x.grad.to_local(), torch.full_like(x.to_local(), 2.0))
    return result


def errors() -> dict[str, str]:
    """What each mistake says, on this rank; nobody waits for anybody."""
    mesh, other = mesh_named("2x2"), mesh_named("4")
    x = hp.distribute_tensor(torch.randn(4, 6), mesh, [Shard(0), Replicate()])
    said: dict[str, str] = {}

    def note(name: str, call: Any) -> None:
        try:
            call()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        else:
            said[name] = "nothing"

    note("no rule", lambda: torch.fft.fft(x))
    note("two meshes", lambda: x + hp.distribute_tensor(torch.randn(4, 6), other, [Shard(0)]))
    note("plain", lambda: x + torch.randn(4, 6))
    note("shapes", lambda: x @ x)
    note("axis", lambda: mesh.layout("pp", None))
    note("dims", lambda: x.redistribute(mesh.layout("dp")))
    note("numpy", lambda: x.numpy())
    with torch._C.DisableTorchFunctionSubclass():
        note("below", lambda: x + x)
    note(
        "uneven",
        lambda: DTensor.from_local(
            torch.zeros(2 - mesh.get_local_rank("dp"), 6), mesh, [Shard(0), Replicate()], run_check=True
        ),
    )
    rank = mesh.get_rank()
    note(
        "one rank is wrong",
        lambda: DTensor.from_local(
            torch.zeros(2 if rank == 3 else 1, 6), mesh, [Shard(0), Replicate()], shape=(2, 6), run_check=True
        ),
    )
    note("in place", lambda: hp.distribute_tensor(torch.zeros(4), mesh, [Partial(), Replicate()]).exp_())
    note(
        "activation in place",
        lambda: F.relu(hp.distribute_tensor(torch.zeros(4), mesh, [Partial(), Replicate()]), True),
    )
    note("mask", lambda: x[x > 0])
    note("out", lambda: torch.exp(x, out=x.detach()))
    with hp.unknown_ops("replicate"):
        note("set", lambda: x.detach().__setitem__(0, 1.0))
    with hp.explicit_communication():
        note("implicit", lambda: F.softmax(x, 0))
    note("class", lambda: DTensor(torch.zeros(2)))
    keep_platform_groups()
    return said


def unknown_ops_on_whole_tensors() -> dict[str, Any]:
    mesh = mesh_named("2x2")
    whole = torch.randn(4, 6)
    x = hp.distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).detach().requires_grad_()
    with hp.unknown_ops("replicate"):
        y = torch.diff(x)
        y.square().sum().backward()
    try:
        torch.diff(x)
        is_refused_again = False
    except NotImplementedError:  # what was decided inside does not hold outside
        is_refused_again = True
    right = whole.clone().requires_grad_()
    torch.diff(right).square().sum().backward()
    keep_platform_groups()
    return {
        "value": torch.equal(y.full_tensor(), torch.diff(whole)),
        "layout": y.layout.is_replicated,
        "refused outside": is_refused_again,
        "gradient": torch.allclose(x.grad.full_tensor(), right.grad),
    }


def gradients_of_every_kind() -> dict[str, bool]:
    """`autograd.grad`, a second backward, double backward, hooks: as on one device."""
    mesh = mesh_named("2x2")
    whole, weight = torch.randn(4, 6), torch.randn(6, 6)
    results = []
    for is_sharded in (False, True):
        x, w = whole.clone().requires_grad_(), weight.clone().requires_grad_()
        if is_sharded:
            x = hp.distribute_tensor(whole, mesh, [Shard(0), Replicate()]).detach().requires_grad_()
            w = hp.distribute_tensor(weight, mesh, [Replicate(), Shard(1)]).detach().requires_grad_()
        seen: list[Any] = []
        hidden = x @ w
        hidden.register_hook(lambda grad, seen=seen: seen.append(grad))
        loss = hidden.pow(3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        accumulated = x.grad
        (second,) = torch.autograd.grad(first.pow(2).sum(), w)
        results.append([_whole(each) for each in (first, accumulated, second, seen[0], w.grad)])
    keep_platform_groups()
    names = ("autograd.grad", "twice", "double backward", "hook", "weight")
    return {name: torch.allclose(a, b, rtol=1e-4, atol=1e-4) for name, a, b in zip(names, *results, strict=True)}


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 8, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, ids: Any) -> Any:
        return self.head(self.norm(self.table(ids)) * self.scale)


def tied_weights_and_buffers() -> dict[str, bool]:
    """A weight that stands in two places stays one parameter, split by rows; buffers are distributed with the module."""
    mesh = mesh_named("2x2")
    plain = TiedLanguageModel()
    sharded = hp.shard_module(copy.deepcopy(plain), mesh, ShardPlan(parameters={"table.weight": ("tp", None)}))
    ids = torch.randint(0, 8, (3, 5))
    plain(ids).square().sum().backward()
    sharded(hp.distribute_tensor(ids, mesh, [Shard(0), Replicate()])).square().sum().backward()
    keep_platform_groups()
    grad = sharded.table.weight.grad.full_tensor()
    return {
        "one parameter": sharded.head.weight is sharded.table.weight and len(list(sharded.parameters())) == 3,
        "buffer": isinstance(sharded.scale, DTensor),
        "gradient": torch.allclose(grad, plain.table.weight.grad, rtol=1e-4, atol=1e-4),
    }


def local_functions() -> dict[str, Any]:
    """`custom_shard`: a local function, whose replicated argument gets the sum of the gradients of all ranks."""
    mesh = mesh_named("2x2")
    x, f = torch.randn(4, 6), torch.randn(6)
    run = hp.custom_shard(
        lambda x, f, n: (x * f * n, x.sum()),
        mesh,
        [("dp", None), (None,), None],
        (("dp", None), [Partial(), Replicate()]),
    )
    whole, part = hp.distribute_tensor(x, mesh).requires_grad_(), hp.distribute_tensor(f, mesh).requires_grad_()
    product, total = run(whole, part, 2)
    product.sum().backward()
    said = ""
    try:
        run(whole, part)
    except ValueError as error:
        said = str(error)
    keep_platform_groups()
    return {
        "value": torch.allclose(product.full_tensor(), x * f * 2),
        "sum of the parts": torch.allclose(total.full_tensor(), x.sum(), atol=1e-5),
        "gradient": torch.allclose(part.grad.full_tensor(), 2 * x.sum(0), atol=1e-5),
        "gradient of what was cut": torch.allclose(whole.grad.full_tensor(), (2 * f).expand(4, 6), atol=1e-6),
        "another number of arguments": "3 positional arguments" in said,
    }


def averages() -> dict[str, bool]:
    """A value that is the average of what the ranks hold: the gradient is that of the value, whoever asks."""
    mesh = mesh_named("4")
    x = DTensor.from_local(torch.full((3,), float(mesh.get_rank())), mesh, [Partial("avg")]).requires_grad_()
    y = x * 2
    y.sum().backward()
    (again,) = torch.autograd.grad((x * 2).sum(), x)
    keep_platform_groups()
    return {
        "value": y.full_tensor().tolist() == [3.0] * 3,
        "layout": y.layout is x.layout,
        "gradient": x.grad.full_tensor().tolist() == [2.0] * 3,
        "autograd.grad": again.full_tensor().tolist() == [2.0] * 3,
        "one_hot is of whole numbers": F.one_hot(
            DTensor.from_local(torch.tensor([mesh.get_rank() == 0]).long(), mesh, [Partial()]), 2
        )
        .full_tensor()
        .tolist()
        == [[0, 1]],
    }


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def layouts_in_any_order() -> bool:
    """A dim split by the inner axis first: another rank holds the part, and everything else is the same."""
    mesh = mesh_named("2x2")
    layout = Layout(mesh, (("tp", "dp"), None))
    x = hp.distribute_tensor(torch.arange(8.0).reshape(4, 2), layout)
    right = torch.arange(8.0).reshape(4, 2)[2 * mesh.get_local_rank("tp") + mesh.get_local_rank("dp")]
    keep = torch.equal(x.to_local()[0], right) and torch.equal(x.full_tensor(), torch.arange(8.0).reshape(4, 2))
    keep_platform_groups()
    return keep


# -- beside PyTorch's own -----------------------------------------------------------------------------------------------


def clipped_by_pytorch() -> dict[str, bool]:
    """`torch.nn.utils.clip_grad_norm_` of a model of which one parameter is sharded."""
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    gradients = [torch.randn_like(each) for each in plain.parameters()]
    mixed = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    mixed[1].weight = nn.Parameter(hp.distribute_tensor(mixed[1].weight.detach(), mesh, [Shard(0)]))
    found = {}
    for norm_type in (2.0, 1.0, float("inf")):
        for one, other, gradient in zip(plain.parameters(), mixed.parameters(), gradients, strict=True):
            one.grad = gradient.clone()
            other.grad = gradient.clone() if type(other) is nn.Parameter and not isinstance(other, DTensor) else None
            if isinstance(other, DTensor):
                other.grad = hp.distribute_tensor(gradient.clone(), other.layout)
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 0.5, norm_type) for each in (plain, mixed)]
        found[f"norm {norm_type}"] = abs(float(norms[0]) - float(norms[1])) < 1e-5
        found[f"gradients {norm_type}"] = all(
            torch.allclose(one.grad, _whole(other.grad), atol=1e-6)  # the norm is summed in another order
            for one, other in zip(plain.parameters(), mixed.parameters(), strict=True)
        )
    number = hp.distribute_tensor(torch.tensor(3.0), mesh)
    found["a plain number is stacked first"] = torch.stack([torch.tensor(1.0), number]).tolist() == [1.0, 3.0]
    found["and last"] = torch.stack([number, torch.tensor(1.0)]).tolist() == [3.0, 1.0]
    found["a number leaves plain tensors plain"] = torch.equal(torch.ones(2) * number, torch.full((2,), 3.0))
    keep_platform_groups()
    return found


def pytorchs_words() -> dict[str, bool]:
    """PyTorch's own placements and meshes in the places of ours."""
    from torch.distributed import tensor as native

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ours = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    split = hp.distribute_tensor(x, mesh, [native.Shard(0)])
    theirs = native.distribute_tensor(x, mesh, [native.Shard(1)])
    linear = hp.shard_module(
        nn.Linear(4, 8), mesh, ShardPlan({"weight": [native.Shard(0)]}, {"": [[native.Replicate()]]})
    )
    found = {
        "the mesh is the same": split.device_mesh is ours,
        "a layout": split.layout is ours.layout("tp", None),
        "values": torch.equal(split.full_tensor(), x),
        "redistributed": split.redistribute([native.Replicate()]).layout is ours.layout(None, None),
        "mixed with ours": hp.ones((8,), mesh, [Shard(0)]).layout is hp.ones((8,), ours, [native.Shard(0)]).layout,
        "partial": Layout.from_placements(mesh, [native.Partial("product")], 1).placements == (Partial("prod"),),
        "from a part": DTensor.from_local(x, mesh, [native.Partial()]).layout.partial == (("tp", "sum"),),
        "a tensor of theirs": torch.equal(hp.distribute_tensor(theirs, ours, [Shard(0)]).to_local(), split.to_local()),
        "a module": linear(x).layout is ours.layout(None, "tp"),
        "a function": hp.custom_shard(torch.neg, mesh, [[native.Shard(0)]], [native.Shard(0)])(x).layout
        is split.layout,
    }
    keep_all_groups()
    return found


def saved_by_pytorch(folder: str) -> dict[str, Any]:
    """A model with a sharded parameter, saved and loaded in PyTorch's ways."""
    import io

    from torch.distributed import checkpoint as dcp

    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def model(axes: tuple[Any, Any]) -> nn.Module:
        return hp.shard_module(nn.Linear(4, 6), mesh, ShardPlan({"weight": axes}))

    first, second = model(("tp", None)), model((None, "tp"))
    whole = first.weight.full_tensor().detach()
    dcp.save(first.state_dict(), checkpoint_id=folder)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=folder)
    found: dict[str, Any] = {"resharded": torch.equal(second.weight.full_tensor(), whole)}
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    third = model(("tp", None))
    third.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    found["torch.save"] = torch.equal(third.weight.to_local(), first.weight.to_local())
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, buffer.getvalue())
    try:
        torch.load(io.BytesIO(texts[dist.get_rank() - 1]), weights_only=True)
    except RuntimeError as error:
        found["another rank's file"] = str(error)
    try:
        third.load_state_dict({"weight": whole, "bias": torch.zeros(6)})
    except RuntimeError as error:
        found["whole tensors"] = str(error)
    platform = hp.get_platform()
    options = dcp.state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = platform.get_model_state_dict(first, options=options)
    found["full"] = type(full["weight"]) is torch.Tensor and torch.equal(full["weight"], whole)
    parts = dcp.state_dict.get_model_state_dict(first)
    found["parts"] = torch.equal(parts["weight"].to_local(), first.weight.to_local())
    for ask in (
        dcp.state_dict.get_model_state_dict,
        lambda model, **ways: dcp.state_dict.get_state_dict(model, [], **ways),
    ):
        try:
            ask(nn.Sequential(first), options=options)
        except RuntimeError as error:
            found.setdefault("PyTorch's whole tensors", set()).add(str(error))
    try:
        platform.save_checkpoint(first, f"{folder}/x.safetensors")
    except ValueError as error:
        found["save_checkpoint"] = str(error)
    keep_platform_groups()
    return found
