"""A Llama block of distributed tensors on MindSpore: tensor and sequence parallel, beside one device. Runs in worker processes."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, mint, nn, ops

import hyper_parallel as hp
from hyper_parallel import ShardPlan, init_device_mesh
from support.mindspore_dtensor_programs import tensor, whole
from support.process_worker import keep_platform_groups

WIDTH, HIDDEN, HEADS = 16, 24, 4
SIZE = WIDTH // HEADS


class RMSNorm(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(tensor(WIDTH, seed=1), name="weight")

    def construct(self, x: Any) -> Any:
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + 1e-5) * self.weight


def layer(kind: str, num_in: int, num_out: int) -> nn.Cell:
    """`Dense` makes a matrix of its input first, `Linear` takes any number of dims."""
    if kind == "Dense":
        return nn.Dense(num_in, num_out, has_bias=False)
    return mint.nn.Linear(num_in, num_out, bias=False)


class Attention(nn.Cell):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (layer(kind, WIDTH, WIDTH) for _ in range(4))

    def construct(self, x: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = (w(x).reshape(batch, length, HEADS, SIZE) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.transpose(0, 2, 1, 3) for each in (rotated(q, cosine, sine), rotated(k, cosine, sine), v))
        scores = ops.matmul(q, k.transpose(0, 1, 3, 2)) * SIZE**-0.5 + mask
        attended = ops.matmul(ops.softmax(scores, -1), v)
        return self.wo(attended.transpose(0, 2, 1, 3).reshape(batch, length, WIDTH))


class SwiGLU(nn.Cell):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.up = layer(kind, WIDTH, HIDDEN), layer(kind, WIDTH, HIDDEN)
        self.down = layer(kind, HIDDEN, WIDTH)

    def construct(self, x: Any) -> Any:
        return self.down(ops.silu(self.gate(x)) * self.up(x))


class Block(nn.Cell):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = RMSNorm(), RMSNorm()
        self.attention, self.mlp = Attention(kind), SwiGLU(kind)
        for index, parameter in enumerate(self.get_parameters()):
            parameter.set_data(tensor(*parameter.shape, seed=index + 1) * 0.3)

    def construct(self, x: Any, cosine: Any, sine: Any, mask: Any) -> Any:
        x = x + self.attention(self.attention_norm(x), cosine, sine, mask)
        return x + self.mlp(self.mlp_norm(x))


def rotated(x: Any, cosine: Any, sine: Any) -> Any:
    half = SIZE // 2
    left, right = x[:, :, :, :half], x[:, :, :, half:]
    return ops.cat((left * cosine - right * sine, left * sine + right * cosine), -1)


PARAMETERS = {
    "attention.w[qkv].weight": ("tp", None), "attention.wo.weight": (None, "tp"),
    "mlp.gate.weight": ("tp", None), "mlp.up.weight": ("tp", None), "mlp.down.weight": (None, "tp"),
}  # fmt: skip
TENSOR_PARALLEL = ShardPlan(parameters=PARAMETERS, outputs={"attention": (None, None, None), "mlp": (None, None, None)})
SEQUENCE_PARALLEL = ShardPlan(
    parameters=PARAMETERS,
    inputs={"attention": [(None, None, None)], "mlp": (None, None, None)},
    outputs={"attention": (None, "tp", None), "mlp": (None, "tp", None)},
)


def llama_block(kind: str, is_sequence_parallel: bool, num_ranks: int) -> dict[str, Any]:
    """Gradients beside those of one device, and what was sent."""
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    plan = SEQUENCE_PARALLEL if is_sequence_parallel else TENSOR_PARALLEL
    plain, sharded = Block(kind), hp.shard_module(Block(kind), mesh, plan)
    x, angle = tensor(2, 8, WIDTH, seed=7), tensor(1, 8, 1, SIZE // 2, seed=8)
    mask = mindspore.Tensor(np.triu(np.full((8, 8), -1e9, np.float32), 1))
    others = [ops.cos(angle), ops.sin(angle), mask]
    mine = hp.distribute_tensor(x, mesh.layout(None, "tp" if is_sequence_parallel else None, None))
    given = [hp.distribute_tensor(each, mesh) for each in others]
    logs: dict[str, Any] = {}

    def loss(module: Any, value: Any, rest: Any) -> Any:
        with hp.comm_debug() as logs["forward"]:
            out = module(value, *rest)
        return (out * out).sum()

    right, found = list(plain.get_parameters()), list(sharded.get_parameters())
    _, (gx, expected) = mindspore.value_and_grad(lambda v: loss(plain, v, others), 0, right)(x)
    with hp.comm_debug() as everything:
        _, (gm, grads) = mindspore.value_and_grad(lambda v: loss(sharded, v, given), 0, found)(mine)
    differences = [
        np.abs(whole(grad, each) - one.asnumpy()).max() / max(np.abs(one.asnumpy()).max(), 1.0)
        for grad, each, one in zip((gm, *grads), (mine, *found), (gx, *expected), strict=True)
    ]
    keep_platform_groups()
    return {
        "difference": float(max(differences)),
        "forward": logs["forward"].counts(),
        "backward": everything.counts("gradient"),
    }
