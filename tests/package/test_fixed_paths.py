"""What other programs import and read stays where it is, wherever the code behind it moves: names by their paths, attributes of wrappers,
values of states, keys of documents. A line is added to these lists for each new promise; none is changed or taken away.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from hyper_parallel.cli.doctor.checks import choose, examine
from hyper_parallel.cli.doctor.document import document_of
from hyper_parallel.cli.doctor.facts import Accelerator, Bfloat16, Facts, Framework, Host, Link, Memory, Package
from hyper_parallel.platform import PlatformType, selection
from support.interpreter import run_fresh

PLATFORM = """
    Platform PlatformType get_platform get_torch_platform get_mindspore_platform EXISTING_COMM_GROUPS
    HYPER_PARALLEL_PLATFORM HYPER_PARALLEL_PLATFORM_TORCH HYPER_PARALLEL_PLATFORM_MINDSPORE
"""
# path -> names, to be had without a framework
WITHOUT_FRAMEWORK = {
    "hyper_parallel": """
        get_platform get_torch_platform get_mindspore_platform platform_of Platform PlatformType HyperParallelError
        CheckpointPolicy checkpoint checkpoint_wrapper apply_activation_checkpointing swap_wrapper offload_wrapper wrappers policies
        SwapManager SwapTensor Storage configure_swap
        plan_memory explain largest Largest MemoryPlan BudgetError
        DeviceMesh init_device_mesh Layout layout Shard Replicate Partial distribute_tensor ones zeros empty full rand randn
        DistributedOp EinsumRule StrategyRule shard_module ShardPlan custom_shard comm_debug explicit_communication unknown_ops NoRuleError
        HookCoordinator overlap_forward_backward Schedule ScheduleError schedules PipelineStage split_stages Pipeline Microbatch
        fully_shard accumulate MixedPrecision
        manual_seed init_on_device materialize value_and_grad clip_grad_norm_
    """,
    "hyper_parallel.platform": PLATFORM + "platform_of",
    "hyper_parallel.platform.platform": PLATFORM,
    "hyper_parallel.core.activation_checkpoint": "CheckpointPolicy checkpoint checkpoint_wrapper",
    "hyper_parallel.core.activation_checkpoint.activation_checkpoint": "CheckpointPolicy checkpoint checkpoint_wrapper",
    "hyper_parallel.core.activation_checkpoint.swap": "SwapManager SwapTensor Storage",
    "hyper_parallel.core.shard.ops.parallel_ops": "DistributedOp",
    "hyper_parallel.core.shard._op_dispatch": "_OP_DISPATCHER",
}
# Subclasses of the framework's own: asking for one chooses the framework.
OF_THE_FRAMEWORK = {
    "hyper_parallel": "DTensor DFunction",
    "hyper_parallel.core.dtensor.dtensor": "DTensor",
    "hyper_parallel.core.shard.dfunction": "DFunction",
}
WRAPPERS = "swap_wrapper SwapWrapper offload_wrapper OffloadWrapper ActivationWrapper AsyncSaveOnCpu base_check_fn "
REGIONS = "checkpoint CheckpointWrapper CheckpointImpl checkpoint_wrapper apply_activation_checkpointing create_selective_checkpoint_contexts "
OF_ONE = {
    "torch": {
        "platform": "TorchPlatform",
        "activation_checkpoint": WRAPPERS + REGIONS + "_CHECKPOINT_WRAPPED_MODULE _CHECKPOINT_PREFIX",
        "activation_checkpoint.activation_swap": WRAPPERS + "_CHECKPOINT_WRAPPED_MODULE _CHECKPOINT_PREFIX",
    },
    "mindspore": {
        "platform": "MindSporePlatform",
        "activation_checkpoint": WRAPPERS + REGIONS + "FuncCell _CKPT_WRAPPED_MODULE",
        "activation_checkpoint.activation_swap": WRAPPERS + "FuncCell _CKPT_WRAPPED_MODULE",
    },
}
METHODS = """
    _create_group _process_current_handle all_gather_into_tensor all_gather_object all_reduce all_to_all_single apply_to_tensors arange
    async_save_on_cpu barrier broadcast cast_fp_tensor cat checkpoint chunk ckpt_wrapper clip_grad_norm_ construct_strided_slice create_group
    create_selective_checkpoint_contexts destroy_process_group differentiable_all_gather_concat differentiable_all_reduce
    differentiable_all_to_all differentiable_all_to_all_single differentiable_all_to_all_single_async differentiable_async_a2a_wait
    differentiable_reduce_scatter differentiable_sync_hook empty_like full_like get_backend get_cell_construct get_cells_and_names
    get_created_group get_current_stream get_element_size get_global_rank get_group_local_rank get_model_state_dict get_op_name
    get_param_local_data get_param_local_shape get_param_type_size get_process_group_ranks get_rank get_stream_context
    get_symmetric_memory_handler get_tensor_storage_size get_tensor_transform get_world_size init_on_device init_parameters
    init_process_group irecv is_embedding_module is_linear_module is_tensor isend list_to_size load_checkpoint load_into_param
    mark_created_groups meta_device micro_batch new_event new_stream new_tensor new_zero_parameter no_grad noop_context_fn p2p_exchange
    parameters_dict profiler_record recv_object_list reduce_scatter_tensor register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook save_checkpoint search_parameter_by_name send_object_list set_grad_reduce_handle
    set_layout_into_parameter set_tensor_requires_grad split_group str_to_dtype swap_wrapper tensor_to_numpy tensor_type_cast tree_map
    update_param_data update_parameter_by_name wait_grad_handle zeros
"""
BESIDE_METHODS = """
    Tensor Parameter Module Function platform_type device_type device get_device_handle get_rng_state set_rng_state manual_seed
    ones full empty current_grad_handle post_grad_handle_process grad_sync_stream
"""


def lacking(path: str, names: str) -> list[str]:
    """Of the names, those that cannot be imported from there."""
    found = []
    for name in names.split():
        try:
            exec(f"from {path} import {name}", {})  # noqa: S102 - as a user writes it: submodules and lazy names count
        except ImportError as error:
            found.append(f"{path}.{name}: {error}")
    return found


@pytest.fixture(params=["torch", "mindspore"])
def framework(request: pytest.FixtureRequest) -> Iterator[str]:
    """Chosen in this process, and not afterwards."""
    pytest.importorskip(request.param)
    selection._forget()
    getattr(selection, f"get_{request.param}_platform")()
    yield request.param
    selection._forget()


def folder(framework: str, part: str) -> Any:
    return importlib.import_module(f"hyper_parallel.platform.{framework}.{part}")


# -- names ---------------------------------------------------------------------------------------------------------------------------


def test_names_that_need_no_framework_are_where_they_were_and_load_none() -> None:
    program = f"""
found = []
for path, names in {WITHOUT_FRAMEWORK!r}.items():
    for name in names.split():
        try:
            exec(f"from {{path}} import {{name}}", {{}})
        except ImportError as error:
            found.append(str(error))
result = found + sorted({{"torch", "mindspore"}} & {{*sys.modules}})
"""
    assert run_fresh(program) == []


def test_names_of_the_framework_are_where_they_were(framework: str) -> None:
    assert [each for path, names in OF_THE_FRAMEWORK.items() for each in lacking(path, names)] == []


def test_names_of_one_framework_are_where_they_were(framework: str) -> None:
    prefix = f"hyper_parallel.platform.{framework}."
    assert [each for part, names in OF_ONE[framework].items() for each in lacking(prefix + part, names)] == []


def test_a_name_that_is_gone_is_found() -> None:
    path = "hyper_parallel.core.activation_checkpoint.swap"
    (gone,) = lacking(path, "SwapManager SwapManger")
    assert gone.startswith(f"{path}.SwapManger: cannot import name")
    assert len(lacking("hyper_parallel.core.activation_checkpoint.swop", "SwapManager Storage")) == 2


def test_every_public_name_of_the_package_is_in_the_list() -> None:
    import hyper_parallel

    listed = f"{WITHOUT_FRAMEWORK['hyper_parallel']} {OF_THE_FRAMEWORK['hyper_parallel']} __version__"
    assert set(hyper_parallel.__all__) == set(listed.split())


def test_the_platform_has_its_methods(framework: str) -> None:
    platform = selection.get_platform()
    assert len(METHODS.split()) == 95
    assert [name for name in f"{METHODS} {BESIDE_METHODS}".split() if not hasattr(platform, name)] == []


# -- attributes and values -----------------------------------------------------------------------------------------------------------


def test_the_inner_module_of_a_wrapper_is_where_other_code_looks_for_it() -> None:
    torch = pytest.importorskip("torch")
    part = folder("torch", "activation_checkpoint")
    assert part._CHECKPOINT_WRAPPED_MODULE == "_checkpoint_wrapped_module"
    assert part._CHECKPOINT_PREFIX == "_checkpoint_wrapped_module."
    for wrap in (part.swap_wrapper, part.offload_wrapper, part.checkpoint_wrapper):
        module = torch.nn.Linear(2, 2)
        assert wrap(module)._checkpoint_wrapped_module is module
    selection._forget()


def test_the_inner_cell_of_a_wrapper_is_where_other_code_looks_for_it() -> None:
    mindspore = pytest.importorskip("mindspore")
    part = folder("mindspore", "activation_checkpoint")
    assert part._CKPT_WRAPPED_MODULE == "_ckpt_wrapped_module"
    cell = mindspore.nn.ReLU()
    for wrap in (part.swap_wrapper, part.offload_wrapper, part.checkpoint_wrapper):
        assert wrap(cell)._ckpt_wrapped_module is cell
        assert wrap(wrap(cell)).unwrap_cell is cell
    assert part.FuncCell(max)._fn is max
    selection._forget()


def test_wrappers_of_one_class_are_the_same_by_both_paths(framework: str) -> None:
    both = folder(framework, "activation_checkpoint"), folder(framework, "activation_checkpoint.activation_swap")
    assert [name for name in WRAPPERS.split() if getattr(both[0], name) is not getattr(both[1], name)] == []


def test_the_swap_manager_is_one_and_states_have_their_values() -> None:
    from hyper_parallel.core.activation_checkpoint.swap import SwapManager, SwapTensor

    assert SwapManager() is SwapManager()
    number = SwapTensor(3, "a number")
    assert number.state.value == "non_tensor"
    states = {each.name: each.value for each in type(number.state)}
    assert states == {
        "DEVICE": "device", "D2H": "d2h", "HOST": "host", "DISK": "disk", "H2D": "h2d", "NON_TENSOR": "non_tensor",
    }  # fmt: skip


def test_policies_and_frameworks_have_their_values() -> None:
    from hyper_parallel import CheckpointPolicy, platform

    policies = ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE", "MUST_SWAP"]
    assert {each.name: each.value for each in CheckpointPolicy} == {name: at for at, name in enumerate(policies)}
    assert {each.name: each.value for each in PlatformType} == {"MINDSPORE": "mindspore", "PYTORCH": "torch"}
    assert platform.HYPER_PARALLEL_PLATFORM == "HYPER_PARALLEL_PLATFORM"
    assert (platform.HYPER_PARALLEL_PLATFORM_TORCH, platform.HYPER_PARALLEL_PLATFORM_MINDSPORE) == (
        "torch",
        "mindspore",
    )


# -- documents -----------------------------------------------------------------------------------------------------------------------

PLAN_KEYS = {
    "budget_bytes": None,
    "plain": {"peak_bytes", "step_ms"},
    "predicted": {"peak_bytes", "step_ms"},
    "measured": {"peak_bytes", "step_ms", "plain_step_ms"},
    "gap": None,
    "setting": {"window_bytes", "prefetch_bytes", "ahead_bytes"},
    "host": {"tier", "used_bytes", "reserved_bytes"},
    "facts": {  # of this made one
        "model", "device", "training", "min_swap_bytes", "loads_by_region", "turn_is_clear", "shared_input_bytes",
    },
    "decision": None,
    "profile": {"regions", "base_bytes", "peak_bytes", "step_ms", "turn", "link", "facts", "is_plain_measured"},
}  # fmt: skip
REGION_KEYS = """
    path call ops inputs forward_ms backward_ms forward_peak_bytes backward_peak_bytes before_ms before_peak_bytes after_ms outside_bytes
    may_be_plain note_bytes is_dynamic
"""
OP_KEYS = "module name call occurrence forward_ms makes reads reads_inputs temporary_bytes choices looks part"


def test_the_json_of_a_plan_has_its_keys() -> None:
    pytest.importorskip("scipy", reason="the solver is in SciPy")
    from hyper_parallel.core.planner.plan import plan_file
    from support import made_plans

    document = json.loads(json.dumps(made_plans.plan_of().as_dict()))
    assert {name: set(each) if isinstance(each, dict) else None for name, each in document.items()} == PLAN_KEYS
    assert (plan_file.FORMAT, plan_file.VERSION) == ("hyper_parallel memory plan", 1)
    first = document["decision"][0]
    assert (set(first), first["plain"], {*first["ops"]}) == ({"plain", "ops", "inputs"}, False, {"recompute", None})
    profile = document["profile"]
    assert (set(profile["turn"]), set(profile["link"])) == (
        {"ms", "peak_bytes"},
        {"out_bytes_per_ms", "in_bytes_per_ms", "both_bytes_per_ms"},
    )
    (region, *_) = profile["regions"]
    assert set(region) == set(REGION_KEYS.split())
    assert set(region["inputs"][0]) == {"value", "may_swap"}
    assert set(region["ops"][0]) == set(OP_KEYS.split())
    assert set(region["ops"][0]["makes"][0]) == {"num_bytes", "is_residual", "freed_after"}


LINK_KEYS = "kind index host_to_device_bytes_per_s device_to_host_bytes_per_s both_each_way_bytes_per_s"
DOCTOR_KEYS = {
    "": "schema result package_version host memory frameworks platform bfloat16 packages environment findings",
    "host": "python python_path system cpu num_cores num_usable_cores nvidia_driver",
    "memory": "total_bytes available_bytes limit_bytes locked_limit_bytes shared_bytes temp_path temp_free_bytes",
    "platform": "chosen why",
    "frameworks": "torch mindspore",
    "frameworks.torch": "is_installed version is_importable is_usable stopped_at error cuda_build device_target accelerators "
    "accelerator_error backends links link_error",
    "frameworks.torch.accelerators.0": "kind index name memory_total_bytes memory_free_bytes capability",
    "frameworks.torch.links.0": LINK_KEYS,
    "findings.0": "name title state what do",
}


def test_the_json_of_the_doctor_has_its_keys() -> None:
    accelerator, link = Accelerator("cuda", 0, "Some GPU"), Link("cuda", 0, 1.0, 1.0, 1.0)
    facts = Facts(
        package_version="0.1.0",
        host=Host("3.11.7", "/opt/bin/python", "Some Linux", "Some CPU", 2, 2, None),
        memory=Memory(None, None, None, None, None, "/scratch", None),
        torch=Framework(PlatformType.PYTORCH, True, "2.13.0", accelerators=(accelerator,), links=(link,)),
        mindspore=Framework(PlatformType.MINDSPORE),
        bfloat16=Bfloat16.WORKS,
        packages=(Package("numpy", "2.1.0", "arrays"),),
        environment={},
    )
    document = json.loads(json.dumps(document_of(facts, choose(facts), examine(facts))))
    assert document["schema"] == 1
    assert document["frameworks"]["mindspore"].keys() == document["frameworks"]["torch"].keys()
    for path, keys in DOCTOR_KEYS.items():
        part: Any = document
        for name in filter(None, path.split(".")):
            part = part[int(name)] if isinstance(part, list) else part[name]
        assert set(part) == set(keys.split()), path
