"""Which framework a process works on, each case in a fresh interpreter."""

from __future__ import annotations

import importlib.util

import pytest

from support.interpreter import run_fresh

has_torch = importlib.util.find_spec("torch") is not None
has_mindspore = importlib.util.find_spec("mindspore") is not None
needs_torch = pytest.mark.skipif(not has_torch, reason="PyTorch is not installed")
needs_mindspore = pytest.mark.skipif(not has_mindspore, reason="MindSpore is not installed")
needs_both = pytest.mark.skipif(
    not (has_torch and has_mindspore), reason="PyTorch and MindSpore are not both installed"
)

CHOOSE = """
import hyper_parallel as hp
result = hp.get_platform().platform_type.value
"""


@needs_mindspore
def test_mindspore_is_chosen_when_it_can_be_imported() -> None:
    assert run_fresh(CHOOSE) == "mindspore"


@needs_torch
def test_pytorch_is_chosen_when_only_it_is_installed() -> None:
    assert run_fresh(CHOOSE, absent=("mindspore",)) == "torch"


@needs_mindspore
def test_mindspore_is_chosen_when_only_it_is_installed() -> None:
    assert run_fresh(CHOOSE, absent=("torch",)) == "mindspore"


@pytest.mark.parametrize("variable", ["", "torch", "mindspore"])
def test_with_neither_installed_the_error_says_what_to_install(variable: str) -> None:
    result = run_fresh(CHOOSE, absent=("torch", "mindspore"), HYPER_PARALLEL_PLATFORM=variable)
    assert "ImportError" in result["error"]
    assert f"pip install '{variable or 'torch'}>=" in result["text"]


@needs_torch
@pytest.mark.parametrize("value", ["torch", "TORCH", "Torch"])
def test_the_variable_chooses_pytorch_in_any_case(value: str) -> None:
    assert run_fresh(CHOOSE, HYPER_PARALLEL_PLATFORM=value) == "torch"


@needs_mindspore
@pytest.mark.parametrize("value", ["mindspore", "MindSpore", "MINDSPORE"])
def test_the_variable_chooses_mindspore_in_any_case(value: str) -> None:
    assert run_fresh(CHOOSE, HYPER_PARALLEL_PLATFORM=value) == "mindspore"


@needs_both
def test_the_variable_loads_only_the_framework_it_names() -> None:
    program = CHOOSE + "result = ['torch' in sys.modules, 'mindspore' in sys.modules]"
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM="torch") == [True, False]
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM="mindspore") == [False, True]


@pytest.mark.parametrize("value", ["jax", "pytorch", "mindspore,torch", "0"])
def test_a_wrong_value_is_named_with_the_two_accepted_ones(value: str) -> None:
    result = run_fresh(CHOOSE, HYPER_PARALLEL_PLATFORM=value)
    assert "ValueError" in result["error"]
    assert repr(value) in result["text"]
    assert "'mindspore'" in result["text"]
    assert "'torch'" in result["text"]


@needs_torch
def test_an_empty_value_counts_as_unset() -> None:
    assert run_fresh(CHOOSE, absent=("mindspore",), HYPER_PARALLEL_PLATFORM="") == "torch"


@pytest.mark.parametrize(("named", "other"), [("torch", "mindspore"), ("mindspore", "torch")])
def test_a_named_framework_that_is_absent_is_an_import_error_without_fallback(named: str, other: str) -> None:
    result = run_fresh(CHOOSE, absent=(named,), HYPER_PARALLEL_PLATFORM=named)
    assert "ImportError" in result["error"]
    assert f"pip install '{named}>=" in result["text"]


@needs_torch
def test_a_mindspore_that_breaks_otherwise_than_by_an_import_error_is_not_passed_over() -> None:
    program = """
import types
class Broken(types.ModuleType):
    def __getattr__(self, name): raise RuntimeError("MindSpore is broken")
sys.modules["mindspore"] = Broken("mindspore")
import hyper_parallel as hp
hp.get_platform()
"""
    result = run_fresh(program)
    assert "RuntimeError" in result["error"]
    assert "broken" in result["text"]


@needs_torch
def test_the_instance_is_cached_and_shared() -> None:
    program = """
import hyper_parallel as hp
from hyper_parallel.platform import get_platform, get_torch_platform
from hyper_parallel.platform.platform import PlatformType
a = get_torch_platform()
result = [a is get_torch_platform(), a is get_platform(), a is hp.get_platform(), a.platform_type is PlatformType.PYTORCH]
"""
    assert run_fresh(program) == [True] * 4


@needs_both
def test_choosing_is_free_until_something_binds() -> None:
    program = """
import hyper_parallel as hp
types = [hp.get_platform(), hp.get_torch_platform(), hp.get_platform(), hp.get_mindspore_platform(), hp.get_platform()]
result = [p.platform_type.value for p in types]
"""
    assert run_fresh(program) == ["mindspore", "torch", "torch", "mindspore", "mindspore"]


@needs_both
def test_a_module_binds_its_framework_and_the_other_is_refused_with_the_call_named() -> None:
    program = """
import hyper_parallel as hp, torch
first = hp.platform_of(torch.nn.Linear(2, 2), call="checkpoint_wrapper").platform_type.value
loaded = "mindspore" in sys.modules
same = hp.get_platform().platform_type.value
try:
    hp.get_mindspore_platform()
except RuntimeError as error:
    result = [first, loaded, same, str(error)]
"""
    first, loaded, same, text = run_fresh(program)
    assert (first, loaded, same) == ("torch", False, "torch")
    assert "checkpoint_wrapper(Linear)" in text
    assert "MindSpore" in text


@needs_both
def test_a_module_of_the_other_framework_later_says_which_is_bound_and_since_when() -> None:
    program = """
import hyper_parallel as hp, torch
import mindspore as ms
hp.platform_of(ms.nn.Dense(2, 2), call="plan_memory")
hp.platform_of(ms.Tensor([1.0]))
hp.platform_of(torch.ones(2), call="checkpoint")
"""
    result = run_fresh(program)
    assert "RuntimeError" in result["error"]
    assert "MindSpore, bound since `plan_memory(Dense)`" in result["text"]
    assert "checkpoint(Tensor)" in result["text"]


@needs_both
def test_a_module_wins_over_a_choice_that_bound_nothing() -> None:
    program = """
import hyper_parallel as hp, torch
before = hp.get_platform().platform_type.value
result = [before, hp.platform_of(torch.nn.Linear(2, 2)).platform_type.value, hp.get_platform().platform_type.value]
"""
    assert run_fresh(program) == ["mindspore", "torch", "torch"]


@needs_torch
def test_a_users_subclass_of_a_module_is_recognised_and_other_things_are_not() -> None:
    program = """
import hyper_parallel as hp, torch
class Mine(torch.nn.Module): pass
kind = hp.platform_of(Mine()).platform_type.value
try:
    hp.platform_of([torch.ones(1)], call="checkpoint_wrapper")
except TypeError as error:
    result = [kind, str(error)]
"""
    kind, text = run_fresh(program)
    assert kind == "torch"
    assert "checkpoint_wrapper" in text
    assert "list" in text


@needs_torch
def test_ten_threads_get_one_instance() -> None:
    program = """
import threading
from hyper_parallel.platform import get_platform
seen = []
threads = [threading.Thread(target=lambda: seen.append(id(get_platform()))) for _ in range(10)]
[t.start() for t in threads]; [t.join() for t in threads]
result = [len(seen), len(set(seen))]
"""
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM="torch") == [10, 1]


@needs_torch
def test_an_old_pytorch_is_named_with_the_version_that_is_needed() -> None:
    program = """
import torch
torch.__version__ = "2.4.1"
import hyper_parallel as hp
hp.get_torch_platform()
"""
    result = run_fresh(program)
    assert "ImportError" in result["error"]
    assert "2.8" in result["text"]
    assert "2.4.1" in result["text"]


@needs_mindspore
def test_numpy_two_with_mindspore_says_what_to_install() -> None:
    program = """
import numpy, mindspore
numpy.__version__ = "2.4.6"
from unittest import mock
def dies(*args, **kwargs): raise SystemError("returned a result with an exception set")
import hyper_parallel as hp
with mock.patch.object(mindspore.Tensor, "__mul__", dies):
    hp.get_mindspore_platform()
"""
    result = run_fresh(program)
    assert "RuntimeError" in result["error"]
    assert "numpy<2" in result["text"]


@needs_both
@pytest.mark.parametrize("name", ["DFunction", "DTensor"])
def test_importing_what_is_made_of_a_framework_binds_to_it(name: str) -> None:
    program = f"""
import hyper_parallel as hp
from hyper_parallel import {name}
hp.get_mindspore_platform()
"""
    result = run_fresh(program, HYPER_PARALLEL_PLATFORM="torch")
    assert "RuntimeError" in result["error"]
    assert f"PyTorch, bound since `import {name}`" in result["text"]


@needs_both
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_a_function_of_one_framework_refuses_tensors_of_the_other(framework: str) -> None:
    program = """
from hyper_parallel import DFunction
import torch, mindspore as ms
class Double(DFunction):
    @staticmethod
    def forward(ctx, x): return x * 2
tensors = {"torch": torch.ones(2), "mindspore": ms.Tensor([1.0])}
own, other = tensors.pop(HERE), tensors.popitem()[1]
Double.apply(own)
Double.apply(other)
""".replace("HERE", repr(framework))
    result = run_fresh(program, HYPER_PARALLEL_PLATFORM=framework)
    assert "TypeError" in result["error"]
    assert "`Double` works on one framework" in result["text"]


@needs_both
def test_the_public_global_shows_the_platform_and_takes_another_one() -> None:
    program = """
import hyper_parallel as hp
from hyper_parallel.platform import platform as home
result = [home.platform is None, hp.get_platform() is home.platform]
class Mine(type(home.platform)): pass
home.platform = mine = Mine()
result += [hp.get_platform() is mine, hp.get_torch_platform() is mine]
hp.platform_of(__import__("torch").ones(1))
home.platform = None
result += [hp.get_mindspore_platform().platform_type.value, home.platform.platform_type.value]
"""
    assert run_fresh(program, HYPER_PARALLEL_PLATFORM="torch") == [True, True, True, True, "mindspore", "mindspore"]


def test_the_constants_are_those_of_the_specification() -> None:
    from hyper_parallel.platform import platform

    assert platform.HYPER_PARALLEL_PLATFORM == "HYPER_PARALLEL_PLATFORM"
    assert platform.HYPER_PARALLEL_PLATFORM_MINDSPORE == "mindspore"
    assert platform.HYPER_PARALLEL_PLATFORM_TORCH == "torch"
    assert platform.EXISTING_COMM_GROUPS == {}
    assert [member.name for member in platform.PlatformType] == ["MINDSPORE", "PYTORCH"]


@needs_mindspore
def test_activation_memory_on_mindspore_is_reached_by_the_same_names() -> None:
    program = """
import mindspore as ms, hyper_parallel as hp
layer = ms.nn.SequentialCell(ms.nn.Dense(2, 2))
hp.apply_activation_checkpointing(layer)
result = [type(call(layer)).__module__.split(".")[2] for call in (hp.swap_wrapper, hp.offload_wrapper, hp.checkpoint_wrapper)]
result += [name for name, _ in hp.wrappers(layer)]
result += [hp.checkpoint(lambda x: x.shape, ms.Tensor([1.0])), hp.SwapTensor(ms.Tensor([1.0]), "w").state.value]
hp.SwapManager().set_forward_prefetch_layer(layer[0], layer[0])
"""
    assert run_fresh(program) == ["mindspore", "mindspore", "mindspore", "0", [1], "device"]
