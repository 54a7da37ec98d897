"""The table of promises: how many cases each test runs is read from the test itself."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Shown(NamedTuple):
    failure: str
    file: str
    test: str
    cases: str  # what is counted
    in_every_run: str = ""  # where the test has no share of a campaign
    in_full: str = ""


SHOWN = [
    Shown("a gradient differs under a policy", "activation/test_region_campaigns.py", "test_random_programs_give_what_they_give_without_regions", "random programs"),
    Shown("an operator gives other bits in a region, or swapped", "activation/test_databases.py", "test_every_operator_gives_the_bits_of_the_plain_run", "of PyTorch's operators, with 15,000 samples in five ways", "one in 160", "all"),
    Shown("the same of modules", "activation/test_databases.py", "test_every_module_gives_the_bits_of_the_plain_run", "of PyTorch's modules, with 2,500 samples in five ways", "one in 160", "all"),
    Shown("the same on MindSpore", "activation/test_mindspore_campaigns.py", "test_random_programs_give_the_bits_of_the_plain_run", "random programs"),
    Shown("a recomputation differs and nobody notices", "activation/test_region_campaigns.py", "test_a_recomputation_that_differs_is_found_and_named", "injected differences", "304", "304"),
    Shown("a number or a tensor is another one in the second run", "activation/test_drifting_programs.py", "test_what_is_another_one_in_the_second_run_is_found_and_what_is_not_is_right", "programs, in every kind of region", "56", "1,904"),
    Shown("what a module counts, draws or chooses is moved twice", "activation/test_stateful_programs.py", "test_what_modules_count_draw_freeze_and_choose_is_trained_as_without_regions", "random programs of four steps"),
    Shown("a recomputation does not differ and is refused", "activation/test_region_campaigns.py", "test_a_recomputation_that_does_not_differ_raises_nothing_when_values_are_compared", "programs"),
    Shown("a saved tensor is changed in place and nobody notices", "activation/test_campaigns.py", "test_a_saved_tensor_changed_in_place_raises_wherever_plain_pytorch_does", "programs"),
    Shown("a harmless change is refused", "activation/test_campaigns.py", "test_changes_that_plain_pytorch_allows_raise_nothing_and_give_its_gradients", "programs"),
    Shown("an alias is moved twice, or a user's tensor is touched", "activation/test_campaigns.py", "test_aliases_give_plain_gradients_untouched_users_tensors_and_no_byte_twice", "programs"),
    Shown("an exception leaves something behind", "activation/test_campaigns.py", "test_an_exception_at_any_engine_call_leaks_nothing_and_the_next_step_is_right", "programs, failed at every engine call"),
    Shown("the same, in regions", "activation/test_region_campaigns.py", "test_an_exception_anywhere_leaks_nothing_and_the_next_step_is_right", "programs, failed at every op and call"),
    Shown("Ctrl-C leaves something behind", "activation/test_interrupts.py", "test_ctrl_c_anywhere_leaves_nothing_on_the_thread_and_the_next_step_is_right", "moments of a step, in five ways", "each place at a stack", "1,500 or more each"),
    Shown("the same, in the swap engine", "activation/test_swap_interrupts.py", "test_ctrl_c_anywhere_in_a_step_that_swaps_costs_that_step_alone", "places at which Python looks for it, in each way to swap", "100", "all, about 4,800"),
    Shown("the same, in planning", "planner/test_interrupts.py", "test_ctrl_c_in_planning_leaves_the_model_and_the_thread_as_they_were", "moments of planning", "a share of the places at a stack", "1,500 or more"),
    Shown("memory runs out", "swap/test_engine_programs.py", "test_a_failed_allocation_is_survived_or_reaches_the_user_and_the_next_step_is_right", "every allocation of random programs", "all", "all"),
    Shown("memory grows", "activation/test_campaigns.py", "test_bytes_stay_the_same_over_many_steps_with_the_collector_off", "steps"),
    Shown("threads mix", "activation/test_campaigns.py", "test_ten_threads_with_several_forwards_alive_are_right", "steps in each of ten threads"),
    Shown("streams race", "swap/test_engine_programs.py", "test_random_programs_give_right_numbers_without_races_or_leaks", "random programs on a simulated device"),
    Shown("the same on a GPU", "activation/test_cuda_streams.py", "test_five_hundred_steps_with_random_delays_on_every_stream_are_bitwise_equal", "steps with random delays", "0 (no GPU)", "500"),
    Shown("these campaigns would miss a bug", "swap/test_planted_bugs.py", "test_there_are_at_least_twenty", "planted bugs that are found", "20 or more", "20 or more"),
    Shown("a budget is exceeded", "planner/test_plan.py", "test_random_budgets_are_kept_and_gradients_are_those_of_the_plain_run", "random budgets on five small models", "100", "100"),
    Shown("wrappers change names", "activation/test_wrapper_names.py", "test_states_go_both_ways_between_wrapped_and_unwrapped_with_no_key_different", "random modules", "100", "100"),
    Shown("an operator's rule is wrong", "dtensor/test_rules_on_ranks.py", "test_values_and_gradients_are_those_of_one_device", "layouts of each operator"),
    Shown("a redistribution is wrong, or moves too much", "dtensor/test_redistribution.py", "test_every_pair_of_layouts_is_right_and_receives_nearly_the_fewest_bytes", "pairs of layouts on three meshes", "a share", "all"),
    Shown(
        "a schedule of a pipeline cannot run, and is said to",
        "parallel/test_schedule_check.py",
        "test_of_damaged_schedules_the_check_says_what_running_them_shows",
        "damaged schedules",
    ),
    Shown(
        "a pipeline's loss or gradient is another one",
        "parallel/test_pipeline_on_ranks.py",
        "test_stages_that_are_not_easy_train_as_in_one_process",
        "models of four stages, in three schedules",
        "15",
        "15",
    ),
    Shown(
        "real processes do otherwise than the check of a schedule says",
        "parallel/test_schedules_on_ranks.py",
        "test_processes_that_follow_damaged_schedules_show_what_the_check_says",
        "damaged schedules, of which those that send",
    ),
    Shown(
        "a Hugging Face model trains otherwise in stages",
        "parallel/test_stages_of_models.py",
        "test_of_all_families_none_trains_otherwise_than_in_one_process",
        "families of language models",
        "22",
        "189",
    ),
    Shown(
        "a rank of a pipeline fails, and others wait for ever",
        "parallel/test_pipeline_failures.py",
        "test_every_rank_ends_in_time_and_names_whom_it_waited_for",
        "kills, stalls and errors at any action, hook or loss",
    ),
    Shown(
        "a gradient that waited is another one",
        "parallel/test_weight_gradients.py",
        "test_both_parts_add_up_to_one_backward",
        "random graphs",
    ),
    Shown("ranks wait for one that is gone", "platform/test_missing_ranks.py", "test_the_others_name_the_rank_that_is_missing_on_pytorch", "stalls and kills"),
    Shown("the same on MindSpore", "platform/test_missing_ranks.py", "test_the_others_name_the_rank_that_is_missing_on_mindspore", "stalls and kills"),
    Shown(
        "a side of an overlap waits for ever",
        "parallel/test_coordinator.py",
        "test_a_failure_at_any_hook_ends_both_sides_with_one_to_eight_layers_on_either",
        "errors, interrupts and late sides at random hooks",
    ),
    Shown("a checkpoint is torn", "platform/test_tensor_file.py", "test_a_save_killed_at_any_file_call_leaves_the_old_or_the_new_file", "every file call", "all", "all"),
    Shown("a checkpoint is damaged and nobody notices", "platform/test_tensor_file.py", "test_every_damaged_file_is_found", "bit flips and cuts", "1,000", "10,000"),
    Shown("something else than a plain file is replaced", "base/test_files.py", "test_what_is_no_plain_file_is_never_replaced", "devices, pipes and folders, by each writer", "all", "all"),
    Shown("a plan file that was changed fails in the depth", "planner/test_hostile_plan_files.py", "test_a_changed_plan_file_works_or_is_refused_in_words", "changed files"),
    Shown("a wrong value fails in the depth", "platform/test_wrong_values.py", "test_wrong_values_end_in_words_of_ours_wherever_they_are_given", "calls on each framework"),
    Shown("data runs code", "platform/test_tensor_file.py", "test_a_hostile_file_is_refused_and_runs_nothing", "hostile files", "30 or more", "30 or more"),
]  # fmt: skip


def rows() -> list[list[str]]:
    """One line per promise.

    Raises:
        LookupError: a test that is named here is not there any more.
    """
    return [
        [each.failure, *_numbers(each), each.cases, f"{each.test.removeprefix('test_').replace('_', ' ')} (`tests/{each.file}`)"]
        for each in SHOWN
    ]  # fmt: skip


def _numbers(shown: Shown) -> tuple[str, str]:
    tree = ast.parse((ROOT / "tests" / shown.file).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == shown.test:
            found = [_of_share(call) for call in ast.walk(node) if isinstance(call, ast.Call)]
            numbers = next((each for each in found if each), None)
            if numbers is None and not shown.in_every_run:
                raise LookupError(f"{shown.file}: {shown.test} has no share of a campaign")
            return numbers if numbers and not shown.in_every_run else (shown.in_every_run, shown.in_full)
    raise LookupError(f"{shown.file} has no {shown.test} any more: put another test into docs/hooks/promises.py")


def _of_share(call: ast.Call) -> tuple[str, str] | None:
    """The numbers of `share(all_cases, in_every_run)`."""
    if not (isinstance(call.func, ast.Name) and call.func.id == "share" and len(call.args) == 2):
        return None
    all_cases, in_every_run = (each.value if isinstance(each, ast.Constant) else None for each in call.args)
    if not (isinstance(all_cases, int) and isinstance(in_every_run, int)):
        return None
    return f"{in_every_run:,}", f"{all_cases:,}"
