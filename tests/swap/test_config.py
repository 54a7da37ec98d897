"""Settings: sizes as people write them, checked before they count, for the process or for a block."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.swap import config as config_module
from hyper_parallel.core.swap.config import (
    SwapConfig,
    configure_swap,
    current_config,
    default_disk_budget,
    default_host_budget,
    default_min_bytes,
    default_prefetch_bytes,
    default_window_bytes,
    machine_disk_budget,
    machine_host_budget,
    on_change,
)
from hyper_parallel.core.swap.host_memory import HostMemory, num_local_processes, read_host_memory
from hyper_parallel.core.swap.sizes import format_size, parse_size

KIB, MIB, GIB = 1024, 1024**2, 1024**3


@pytest.fixture(autouse=True)
def the_setting_is_put_back() -> Iterator[None]:
    before = current_config()
    yield
    configure_swap(**{name: getattr(before, name) for name in SwapConfig.__dataclass_fields__})


# -- sizes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0), (17, 17), ("17", 17), ("17B", 17), ("0", 0), ("0GiB", 0),
        ("64KiB", 64 * KIB), ("512 MiB", 512 * MIB), ("8GiB", 8 * GIB), ("2TiB", 2048 * GIB), ("1PiB", 1024**5),
        ("1KB", 1000), ("1.5GB", 1_500_000_000), ("3mb", 3_000_000), ("2TB", 2 * 10**12), ("1 pb", 10**15),
        ("8gib", 8 * GIB), ("  8   GIB ", 8 * GIB), (".5GiB", GIB // 2), ("0.3KiB", 307), ("1.1GiB", 1181116006),
    ],
)  # fmt: skip
def test_a_size_is_read(text: int | str, num_bytes: int) -> None:
    assert parse_size(text, "x") == num_bytes


def test_an_integer_of_another_library_is_a_size() -> None:
    class Eight:
        def __index__(self) -> int:
            return 8

    assert parse_size(Eight(), "x") == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "-5",
        "8G",
        "8Gi",
        "8 giga",
        "1,5GiB",
        "1e9",
        "nan",
        "inf",
        "8GiBB",
        "8 Gi B",
        "1.5",
        "1.5B",
        "٣GiB",
    ],
)
def test_a_text_that_is_no_size_is_refused_with_the_option_the_value_and_the_forms(text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_size(text, "host_budget")
    message = str(caught.value)
    assert "host_budget" in message
    assert repr(text) in message
    assert '"8GiB", "512 MiB", "1.5GB"' in message


def test_a_unit_that_could_mean_two_things_is_answered_with_both() -> None:
    with pytest.raises(ArgumentError, match='Write "8GiB" or "8GB".'):
        parse_size("8g", "host_budget")


@pytest.mark.parametrize("value", [True, False, 1.0, None, b"8GiB", [1]])
def test_a_value_that_is_neither_integer_nor_text_is_refused(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="host_budget is no size") as caught:
        parse_size(value, "host_budget")
    assert isinstance(caught.value, TypeError)


def test_a_negative_integer_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"window_bytes is negative.\n.*got -1 \(int\)"):
        parse_size(-1, "window_bytes")


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (MIB - 1, "1 MiB"), (MIB, "1 MiB"),
        (1200 * MIB, "1.17 GiB"), (10 * GIB, "10 GiB"), (100 * GIB, "100 GiB"), (3 * 1024**5, "3 PiB"), (5000 * 1024**5, "5000 PiB"),
        (-1536, "-1.5 KiB"),
    ],
)  # fmt: skip
def test_a_size_is_shown(num_bytes: int, text: str) -> None:
    assert format_size(num_bytes) == text


def test_what_is_shown_is_read_back_to_within_half_a_hundredth() -> None:
    rng = random.Random(0)
    for _ in range(5000):
        num_bytes = int(2 ** rng.uniform(0, 55))
        shown = parse_size(format_size(num_bytes), "x")
        # half a hundredth of the unit, which is at most the number itself, and the fraction of a byte that reading drops
        assert abs(shown - num_bytes) <= num_bytes / 200 + 1


# -- settings -------------------------------------------------------------------------------------------------------------


def test_nothing_is_set_at_first() -> None:
    assert SwapConfig() == SwapConfig(
        host_budget=None, disk_dir=None, disk_budget=None, window_bytes=None, prefetch_bytes=None, min_bytes=None,
        on_full="wait", check=None,
    )  # fmt: skip


def test_a_call_sets_everything_for_the_process_and_says_it_whole(tmp_path: Path) -> None:
    configure_swap(
        host_budget="8GiB", disk_dir=tmp_path, disk_budget="1TB", window_bytes=0, prefetch_bytes="64KiB", min_bytes=5,
        on_full="keep", check="values",
    )  # fmt: skip
    assert current_config() == SwapConfig(8 * GIB, str(tmp_path), 10**12, 0, 64 * KIB, 5, "keep", "values")
    configure_swap(min_bytes="2KiB")
    assert current_config() == SwapConfig(min_bytes=2048)


def test_a_setting_cannot_be_changed_in_place() -> None:
    with pytest.raises(AttributeError):
        current_config().on_full = "keep"  # type: ignore[misc]


def test_a_block_has_its_setting_and_then_the_one_before_counts_again() -> None:
    configure_swap(host_budget=10)
    with configure_swap(host_budget=20) as config:
        assert config is current_config()
        assert config.host_budget == 20
        with configure_swap(on_full="keep"):
            assert current_config() == SwapConfig(on_full="keep")
        assert current_config().host_budget == 20
    assert current_config() == SwapConfig(host_budget=10)


def test_a_block_that_raises_ends_its_setting_as_well() -> None:
    configure_swap(host_budget=10)
    with pytest.raises(KeyError), configure_swap(host_budget=20):
        raise KeyError
    assert current_config().host_budget == 10


def test_a_call_inside_a_block_ends_with_the_block() -> None:
    configure_swap(host_budget=10)
    with configure_swap(host_budget=20):
        configure_swap(host_budget=30)
        assert current_config().host_budget == 30
    assert current_config().host_budget == 10


def test_a_setting_can_be_used_for_several_blocks() -> None:
    configure_swap(host_budget=10)
    setting = configure_swap(host_budget=20)
    for _ in range(2):
        with setting:
            assert current_config().host_budget == 20
            with setting:
                assert current_config().host_budget == 20
            assert current_config().host_budget == 20
        assert current_config().host_budget == 10


def test_a_block_counts_for_other_threads_and_overlapping_blocks_end_in_any_order() -> None:
    configure_swap(host_budget=10)
    first, second = configure_swap(host_budget=20), configure_swap(host_budget=30)
    configure_swap(host_budget=10)
    seen: list[int | None] = []

    def in_a_thread(step: Any) -> None:
        thread = threading.Thread(target=lambda: (step(), seen.append(current_config().host_budget)))
        thread.start()
        thread.join()

    in_a_thread(first.__enter__)
    in_a_thread(second.__enter__)
    in_a_thread(lambda: first.__exit__(None, None, None))
    assert seen == [20, 30, 30]
    second.__exit__(None, None, None)
    assert current_config().host_budget == 10


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"host_budget": 0}, ValueError, "host_budget leaves no room"),
    ({"host_budget": "0GiB"}, ValueError, "host_budget leaves no room"),
    ({"host_budget": "much"}, ValueError, "host_budget.*\n.*'much'"),
    ({"host_budget": -1}, ValueError, "host_budget is negative"),
    ({"host_budget": True}, TypeError, "host_budget"),
    ({"window_bytes": "much"}, ValueError, "window_bytes"),
    ({"prefetch_bytes": 1.5}, TypeError, "prefetch_bytes"),
    ({"min_bytes": "1 GG"}, ValueError, "min_bytes"),
    ({"disk_budget": "1GiB"}, ValueError, "disk_budget without disk_dir.*\n.*\n.*disk_dir"),
    ({"disk_dir": ".", "disk_budget": 0}, ValueError, "disk_budget leaves no room"),
    ({"disk_dir": 5}, TypeError, "disk_dir is no path"),
    ({"disk_dir": b"."}, TypeError, "disk_dir is no path"),
    ({"disk_dir": ""}, ValueError, "disk_dir names no directory"),
    ({"disk_dir": "a\0b"}, ValueError, "disk_dir names no directory"),
    ({"on_full": "stop"}, ValueError, "on_full.*\nExpected 'wait' or 'keep', got 'stop'"),
    ({"on_full": None}, ValueError, "on_full.*\nExpected 'wait' or 'keep', got None"),
    ({"check": "bits"}, ValueError, "check.*\nExpected None, \"values\".*got 'bits'"),
    ({"check": True}, ValueError, "check"),
    ({"check": ["values"]}, ValueError, "check"),
    ({"host_bugdet": 1}, TypeError, "no option 'host_bugdet'.*\n.*host_budget, disk_dir.*\nDid you mean host_budget?"),
    ({"xyz": 1}, TypeError, "no option 'xyz'"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_call_names_the_option_and_changes_nothing(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    configure_swap(host_budget=10)
    changes: list[SwapConfig] = []
    forget = on_change(changes.append)
    with pytest.raises(kind, match=message):
        configure_swap(**{"min_bytes": 7, **options})
    forget()
    assert current_config() == SwapConfig(host_budget=10)
    assert changes == []


def test_options_are_named_never_placed() -> None:
    with pytest.raises(TypeError):
        configure_swap("8GiB")  # type: ignore[misc]


def test_a_missing_directory_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"does not exist.*\n.*{tmp_path}/swap.*\nCreate it"):
        configure_swap(disk_dir=tmp_path / "swap")


@pytest.mark.parametrize("disk_budget", [None, "1MiB"])
def test_a_directory_that_has_gone_before_its_first_use_is_named_and_may_come_back(
    tmp_path: Path, disk_budget: str | None
) -> None:
    torch = pytest.importorskip("torch")
    from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper

    folder = tmp_path / "swap"
    folder.mkdir()
    block = swap_wrapper(torch.nn.Tanh())
    x = torch.ones(4, requires_grad=True)
    with configure_swap(disk_dir=folder, disk_budget=disk_budget, min_bytes=1):
        folder.rmdir()
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"disk_dir does not exist.*\n.*{folder}.*\nCreate it"):
                block(x * 1)
        folder.mkdir()
        block(x * 1).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.tanh(x).sum(), x)[0])


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "swap").write_text("")
    with pytest.raises(ArgumentError, match=f"is no directory.*\n.*{tmp_path}/swap"):
        configure_swap(disk_dir=str(tmp_path / "swap"))


def test_a_directory_in_which_no_file_can_be_made_is_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot be written.*\n.*/proc .*errno.*\nChange its permissions"):
        configure_swap(disk_dir="/proc")


def test_a_directory_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ArgumentError, match=f"cannot be written.*\n.*{tmp_path} .No space left on device, errno 28"):
        configure_swap(disk_dir=tmp_path)


def test_a_directory_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    configure_swap(disk_dir=tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_relative_directory_stays_the_same_when_the_program_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    configure_swap(disk_dir=".")
    assert current_config().disk_dir == str(tmp_path)


# -- who wants to know ----------------------------------------------------------------------------------------------------


def test_a_callback_hears_of_every_change_in_order_until_it_is_forgotten() -> None:
    configure_swap(host_budget=10)
    heard: list[int | None] = []
    forget = on_change(lambda config: heard.append(config.host_budget))
    configure_swap(host_budget=20)
    with configure_swap(host_budget=30):
        assert heard == [20, 30]
        with configure_swap(host_budget=40):
            pass
    assert heard == [20, 30, 40, 30, 20]
    forget()
    configure_swap(host_budget=50)
    assert heard == [20, 30, 40, 30, 20]


def test_a_callback_sees_the_new_setting_as_the_current_one() -> None:
    seen: list[bool] = []
    forget = on_change(lambda config: seen.append(config is current_config()))
    with configure_swap(host_budget=30):
        pass
    forget()
    assert seen == [True, True]


def test_a_callback_that_refuses_makes_the_call_fail_and_change_nothing() -> None:
    configure_swap(host_budget=10)
    heard: list[int | None] = []

    def refuse(config: SwapConfig) -> None:
        if config.host_budget == 20:
            raise MemoryError("not so much")

    forgets = [on_change(lambda config: heard.append(config.host_budget)), on_change(refuse)]
    with pytest.raises(MemoryError, match="not so much"):
        configure_swap(host_budget=20)
    for forget in forgets:
        forget()
    assert current_config().host_budget == 10
    assert heard == [20, 10]


# -- defaults from the machine --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_bytes", "window_bytes", "prefetch_bytes"),
    [
        (0, 64 * MIB, 32 * MIB), (GIB, 64 * MIB, 32 * MIB), (16 * GIB, 16 * GIB // 80, 16 * GIB // 80),
        (40 * GIB, GIB // 2, GIB // 2), (141 * GIB, GIB // 2, GIB // 2),
    ],
)  # fmt: skip
def test_the_window_and_the_prefetch_follow_the_size_of_the_device(
    device_bytes: int, window_bytes: int, prefetch_bytes: int
) -> None:
    assert default_window_bytes(device_bytes) == window_bytes
    assert default_prefetch_bytes(device_bytes) == prefetch_bytes


def test_the_host_budget_is_a_share_of_what_is_there_for_this_process() -> None:
    assert default_host_budget(100 * GIB, 50 * GIB) == 30 * GIB
    assert default_host_budget(40 * GIB, 50 * GIB) == 24 * GIB
    assert default_host_budget(100 * GIB, 50 * GIB, limit_bytes=10 * GIB) == 6 * GIB
    assert default_host_budget(100 * GIB, 50 * GIB, limit_bytes=90 * GIB, num_processes=8) == 30 * GIB // 8
    assert default_host_budget(100 * GIB, 0) == 1, "zero would be refused"


def test_the_disk_budget_is_a_share_of_the_free_space() -> None:
    assert default_disk_budget(100 * GIB) == 80 * GIB
    assert default_disk_budget(100 * GIB, num_processes=8) == 10 * GIB
    assert default_disk_budget(0) == 1


def test_small_storages_stay_by_tier() -> None:
    assert default_min_bytes("host") == MIB
    assert default_min_bytes("disk") == 64 * KIB


def test_the_budgets_of_this_machine_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = read_host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
    monkeypatch.setattr(config_module, "read_host_memory", lambda: HostMemory(100 * GIB, 50 * GIB, 20 * GIB))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine_host_budget() == 6 * GIB
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert 0 < machine_disk_budget(str(tmp_path)) < free


@pytest.mark.parametrize(("value", "number"), [("8", 8), ("", 1), ("0", 1), ("many", 1)])
def test_processes_of_a_launcher_are_counted(monkeypatch: pytest.MonkeyPatch, value: str, number: int) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert num_local_processes() == number


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable:  600 kB\n",
        "proc/self/cgroup": groups,
        **files,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert read_host_memory(machine(tmp_path, "", {})) == HostMemory(1000 * KIB, 600 * KIB, None)


def test_the_tightest_control_group_counts_with_its_reclaimable_pages(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/a/memory.max": "500000\n",
        "sys/fs/cgroup/a/memory.current": "450000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 10\ninactive_file 20000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "400000\n",
    }
    assert read_host_memory(machine(tmp_path, "0::/a/b\n", files)).limit_bytes == 70_000


def test_control_groups_of_the_first_version_count_as_well(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "300000\n",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "100000\n",
        "sys/fs/cgroup/memory/job/memory.stat": "total_inactive_file 5000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    assert read_host_memory(machine(tmp_path, groups, files)).limit_bytes == 205_000


def test_in_a_container_whose_groups_path_is_not_visible_the_top_counts(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": "300000\n", "sys/fs/cgroup/memory.current": "400000\n"}
    assert read_host_memory(machine(tmp_path, "0::/docker/abc\n", files)).limit_bytes == 0


def test_a_block_that_ends_gives_every_engine_its_own_budget_and_closes_its_directory(tmp_path: Path) -> None:
    from hyper_parallel.core.swap import engines

    class Device:
        def current_stream(self) -> object: ...

        def offload_stream(self) -> object: ...

        def load_stream(self) -> object: ...

    def engine() -> object:
        found, _ = engines.host_engine(
            "fake:0", Device, bytearray, lambda slab: None, lambda block: memoryview(b""), 1 << 40
        )  # type: ignore[arg-type]
        return found

    try:
        engine()
        managed = engines.all_engines()["fake:0"]
        usual = managed.tier.budget_bytes
        with configure_swap(host_budget=2_000, disk_dir=tmp_path):
            engine()
            assert managed.tier.budget_bytes == 2_000
            assert [tier.name for tier in managed.engine.tiers] == ["host", "disk"]
            disk = managed.engine.tiers[1]
            block = disk.take(100)
            assert block is not None
            disk.give(block)
        assert managed.tier.budget_bytes == usual
        assert [tier.name for tier in managed.engine.tiers] == ["host"]
    finally:
        engines._engines.pop("fake:0", None)
