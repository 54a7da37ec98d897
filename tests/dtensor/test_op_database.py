"""PyTorch's own operator database on two ranks: samples with distributed tensors give what they give with plain ones.

In every run a share of the samples; all of them by
`HYPER_PARALLEL_CAMPAIGN=full python -m pytest -s tests/dtensor/test_op_database.py`.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest

from support import processes
from support.campaign import share

pytest.importorskip("torch")

# Operators that transformer training uses, by the names of the database; the campaign runs all that have a rule.
IN_EVERY_RUN = """
add mul sub div exp tanh where masked_fill clamp matmul mm bmm addmm einsum nn_functional_linear
nn_functional_embedding softmax log_softmax nn_functional_cross_entropy nn_functional_layer_norm
nn_functional_rms_norm nn_functional_scaled_dot_product_attention sum mean amax max_reduction_with_dim var_unbiased
logsumexp norm reshape view permute transpose expand squeeze squeeze_multiple unsqueeze cat stack split chunk
__getitem__ index_select gather scatter scatter_add topk sort cumsum nn_functional_one_hot nn_functional_dropout
nn_functional_pad_constant nn_functional_pad_reflect repeat repeat_interleave nn_functional_relu nn_functional_gelu
nn_functional_silu narrow flip to mode nansum
"""
WITHOUT_A_RULE = [
    "fft_fft",
    "linalg_inv",
    "nn_functional_conv2d",
    "nn_functional_batch_norm",
    "unique",
    "cdist",
    "kron",
]


def run_ops(which: list[str] | None, most_samples: int, ways: list[str] | None, is_unknown_replicated: bool) -> Any:
    from support import op_database  # here: only the workers import PyTorch's test modules

    infos = op_database.database()
    is_wanted = op_database.can_be_distributed if is_unknown_replicated else op_database.has_rule
    names = which or [info.formatted_name for info in infos if is_wanted(info)]
    ways = ways or list(op_database.WAYS)
    return op_database.run_ops(names, most_samples, ways, is_unknown_replicated=is_unknown_replicated)


def on_two_ranks(*arguments: Any) -> collections.Counter[str]:
    """How many calls had which outcome; wrong ones raise."""
    ranks = processes.pool("torch", 2).run(run_ops, *arguments, deadline_s=7200)
    bad = [outcome for outcomes in ranks for outcome in outcomes if outcome.verdict in ("wrong", "crash")]
    counts = collections.Counter(outcome.verdict for outcome in ranks[0])
    print(dict(counts))
    assert not bad, f"{len(bad)} calls, such as\n" + "\n".join(f"{outcome}" for outcome in bad[:20])
    assert [outcome[:3] for outcome in ranks[0]] == [outcome[:3] for outcome in ranks[1]]
    return counts


def test_operators_with_a_rule_give_values_and_gradients_of_plain_tensors() -> None:
    is_share = len(share(2, 1)) == 1
    counts = on_two_ranks(IN_EVERY_RUN.split() if is_share else None, len(share(10**6, 1)), None, False)
    assert counts["right"] > 5 * (counts["refused"] + counts["no rule"])


def test_operators_without_a_rule_give_the_values_of_plain_tensors_if_asked() -> None:
    is_share = len(share(2, 1)) == 1
    counts = on_two_ranks(WITHOUT_A_RULE if is_share else None, len(share(10**6, 1)), ["first"], True)
    assert counts["right"] > 5 * (counts["refused"] + counts["no rule"])
