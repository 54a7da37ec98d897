"""`hp.save` and `hp.load` in one process, on PyTorch: what is kept, what is refused, folders, and the background."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.core.parallel.saving import background, rank_file
from hyper_parallel.core.parallel.saving import folder as folders
from hyper_parallel.platform import selection
from support import killed_checkpoints, processes

torch = pytest.importorskip("torch")
nn = torch.nn


@pytest.fixture(autouse=True)
def _on_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    yield
    background._running.clear()
    selection._forget()


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def same(first: Any, second: Any) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)


def trained(optimizer: str, model: nn.Module, **options: Any) -> Any:
    made = getattr(torch.optim, optimizer)(model.parameters(), **options)
    for _ in range(3):
        made.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        made.step()
    return made


# What is kept


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 0.1, "amsgrad": True}),
        ("Adam", {"lr": torch.tensor(0.1), "capturable": False}),
        ("AdamW", {"lr": 0.1, "fused": True}),
        ("NAdam", {"lr": 0.1}),
        ("Adagrad", {"lr": 0.1}),
        ("RMSprop", {"lr": 0.1, "centered": True}),
        ("Adafactor", {"lr": 0.1}),
        ("Rprop", {"lr": 0.1}),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = net()
    optimizer = trained(name, model, **options)
    hp.save(tmp_path / "a", model=model, optimizer=optimizer)
    again = net(1)
    fresh = getattr(torch.optim, name)(again.parameters(), **{**options, "lr": 7.0})
    hp.load(tmp_path / "a", model=again, optimizer=fresh)
    batch = torch.randn(5, 4)
    for module, step in ((model, optimizer), (again, fresh)):
        step.zero_grad()
        module(batch).square().sum().backward()
        step.step()
    assert same(model, again)
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert {key: type(value) for key, value in one.items()} == {key: type(value) for key, value in two.items()}


def test_schedulers_and_generators_travel_as_extra(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 5])
    optimizer.step()
    scheduler.step()
    state = {"scheduler": scheduler.state_dict(), "python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    state["scheduler"]["milestones"] = dict(state["scheduler"]["milestones"])
    hp.save(tmp_path / "a", model=model, optimizer=optimizer, extra=state)
    assert hp.load(tmp_path / "a", model=net(1)) == state


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64",
     "bool", "complex64", "float8_e4m3fn", "float8_e5m2"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 0, 3)])
def test_every_dtype_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (*shape, size), dtype=torch.uint8)
    values = raw.view(kind).reshape(shape) if shape else raw.view(kind)[0]
    saved, loaded = nn.Module(), nn.Module()
    saved.register_buffer("x", values.clone())
    loaded.register_buffer("x", torch.zeros(shape, dtype=kind))
    hp.save(tmp_path / "a", model=saved)
    hp.load(tmp_path / "a", model=loaded)
    assert torch.equal(loaded.x.reshape(-1).view(torch.uint8), saved.x.reshape(-1).view(torch.uint8))


def test_tensors_that_are_not_contiguous_keep_their_strides_and_get_their_values(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    saved, loaded = nn.Module(), nn.Module()
    saved.register_buffer("x", whole.t())
    saved.register_buffer("y", whole[1:3, 2:5])
    memory = torch.zeros(4, 6), torch.zeros(4, 6)
    loaded.register_buffer("x", memory[0].t())
    loaded.register_buffer("y", memory[1][1:3, 2:5])
    hp.save(tmp_path / "a", model=saved)
    hp.load(tmp_path / "a", model=loaded)
    assert same(saved, loaded)
    assert torch.equal(memory[0], whole)
    assert memory[1].count_nonzero() == 6


class Tied(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


def test_a_tied_weight_is_saved_once_and_loads_into_any_of_its_names(tmp_path: Path) -> None:
    model = Tied()
    hp.save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    assert hp.verify(tmp_path / "a").num_tensors == 1
    untied, again = Tied(is_tied=False), Tied()
    for target in (again, untied):
        hp.load(tmp_path / "a", model=target)
        assert torch.equal(target.head.weight, model.embed.weight)
        assert torch.equal(target.embed.weight, model.embed.weight)


def test_two_weights_load_into_one_that_is_tied_only_if_they_are_equal(tmp_path: Path) -> None:
    apart, model = Tied(is_tied=False), Tied()
    before = model.embed.weight.clone()
    hp.save(tmp_path / "a", model=apart)
    with pytest.raises(ValueError, match="ties two tensors that are not equal"):
        hp.load(tmp_path / "a", model=model)
    assert torch.equal(model.embed.weight, before)
    with torch.no_grad():
        apart.head.weight.copy_(apart.embed.weight)
    hp.save(tmp_path / "a", model=apart)
    hp.load(tmp_path / "a", model=model)
    assert torch.equal(model.embed.weight, apart.embed.weight)


class Compiled(nn.Module):
    """Names are as in what `torch.compile` makes of a module, which takes seconds to import."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_names_are_those_of_the_plain_model_whatever_is_wrapped_around_it(tmp_path: Path) -> None:
    model, target = net(), net(1)
    wrapped = nn.Sequential(*(Compiled(hp.checkpoint_wrapper(layer)) for layer in model))
    hp.save(tmp_path / "a", model=Compiled(wrapped))
    hp.load(tmp_path / "a", model=target)
    assert same(model, target)


def test_a_frozen_parameter_and_one_without_state_stay_so(tmp_path: Path) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = trained("Adam", model, lr=0.1)
    hp.save(tmp_path / "a", model=model, optimizer=optimizer)
    again = net(1)
    fresh = trained("Adam", again, lr=0.1)
    assert again[0].weight in fresh.state
    hp.load(tmp_path / "a", model=again, optimizer=fresh)
    assert again[0].weight not in fresh.state


# What is refused, and then nothing was touched


def renamed() -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Module(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (renamed, "The model has tensors that the checkpoint has not"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)),
            "The checkpoint has tensors that the model has not",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)), "another shape in the checkpoint"),
        (lambda: net().double(), "another dtype in the checkpoint"),
        (lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).to("meta"), "no memory"),
    ],
)
def test_a_model_that_does_not_fit_is_as_it_was(target: Callable[[], Any], words: str, tmp_path: Path) -> None:
    hp.save(tmp_path / "a", model=net())
    model = target()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        hp.load(tmp_path / "a", model=model)
    if "memory" not in words:
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_without_strict_what_both_have_is_loaded_and_cast(tmp_path: Path) -> None:
    model = net()
    hp.save(tmp_path / "a", model=model, extra=1)
    target = renamed().to(torch.bfloat16)
    last = target[3].weight.clone()
    assert hp.load(tmp_path / "a", model=target, strict=False) == 1
    assert torch.equal(target[0].weight, model[0].weight.to(torch.bfloat16))
    assert torch.equal(target[3].weight, last)


def test_an_optimizer_that_was_not_saved_is_as_it_was(tmp_path: Path) -> None:
    model = net()
    hp.save(tmp_path / "a", model=model)
    optimizer = trained("Adam", model, lr=0.1)
    before = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    weights = model[0].weight.clone()
    with pytest.raises(ValueError, match="no state of an optimizer"):
        hp.load(tmp_path / "a", model=model, optimizer=optimizer)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], before)
    assert torch.equal(model[0].weight, weights)
    hp.load(tmp_path / "a", model=model, optimizer=optimizer, strict=False)


def test_groups_that_mix_those_that_were_saved_are_refused(tmp_path: Path) -> None:
    model = net()
    parameters = list(model.parameters())
    two = [{"params": parameters[:2], "lr": 1.0}, {"params": parameters[2:], "lr": 2.0}]
    hp.save(tmp_path / "a", model=model, optimizer=torch.optim.SGD(two))
    with pytest.raises(ValueError, match="parameters of several groups"):
        hp.load(tmp_path / "a", model=model, optimizer=torch.optim.SGD(parameters, lr=3.0))
    turned = torch.optim.SGD([{"params": parameters[2:]}, {"params": parameters[:2]}], lr=3.0)
    hp.load(tmp_path / "a", model=model, optimizer=turned)
    assert [group["lr"] for group in turned.param_groups] == [2.0, 1.0]


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trains a parameter that the model has not"):
        hp.save(tmp_path / "a", model=net(), optimizer=torch.optim.SGD(net().parameters(), lr=1.0))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"model": 3}, TypeError, "tell which framework"),
        ({"model": []}, TypeError, "or a list of stages"),
        ({"extra": {"x": torch.zeros(2)}}, TypeError, r"plain values beside tensors.*\n.*extra\['x'\]"),
        ({"keep": 0}, ValueError, "number of checkpoints"),
        ({"keep": "3"}, TypeError, "number of checkpoints"),
        ({"timeout": -1}, ValueError, "time in seconds"),
        ({"background": 1}, TypeError, "background"),
        ({"optimizer": 3}, TypeError, "no optimizer of PyTorch"),
        ({"path": ""}, ValueError, "empty path"),
        ({"path": "/"}, ValueError, "a folder of its own"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused_in_words(
    arguments: dict[str, Any], kind: type[Exception], words: str, tmp_path: Path
) -> None:
    given = {"path": tmp_path / "a", "model": net(), **arguments}
    with pytest.raises(kind, match=words):
        hp.save(given.pop("path"), **given)
    assert os.listdir(tmp_path) == []


# Folders


def test_only_committed_checkpoints_count_and_the_newest_is_found_by_its_time(tmp_path: Path) -> None:
    assert hp.latest(tmp_path) is None
    for step in (100, 20, 9):
        hp.save(tmp_path / f"step-{step}", model=net())
    (tmp_path / "step-9.partial-0123456789abcdef").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "manifest.json").write_text("{}")
    assert hp.latest(tmp_path) == str(tmp_path / "step-9")
    path = tmp_path / "step-20" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DamagedFileError):
        hp.latest(tmp_path)


def test_keep_removes_older_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_text("")
    (tmp_path / "note.txt").write_text("")
    for step in range(5):
        hp.save(tmp_path / f"step-{step}", model=net(), keep=2)
    assert sorted(os.listdir(tmp_path)) == ["mine", "note.txt", "step-3", "step-4"]
    hp.save(tmp_path / "step-3", model=net(), keep=1)
    assert sorted(os.listdir(tmp_path)) == ["mine", "note.txt", "step-3"]


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.tex").write_text("years")
    (tmp_path / "file").write_text("years")
    for name in ("taken", "file"):
        with pytest.raises((ValueError, OSError), match=r"no checkpoint|not saved"):
            hp.save(tmp_path / name, model=net())
    assert (tmp_path / "taken" / "thesis.tex").read_text() == (tmp_path / "file").read_text() == "years"
    assert sorted(os.listdir(tmp_path)) == ["file", "taken"]
    (tmp_path / "empty").mkdir()
    hp.save(tmp_path / "empty", model=net())


def test_a_link_to_a_checkpoint_stays_one(tmp_path: Path) -> None:
    hp.save(tmp_path / "real", model=net(), extra=1)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    hp.save(tmp_path / "link", model=net(), extra=2)
    assert (tmp_path / "link").is_symlink()
    assert hp.load(tmp_path / "real", model=net()) == 2
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_what_a_dead_save_left_goes_with_the_next_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    dead = tmp_path / "a.partial-0123456789abcdef"
    dead.mkdir()
    (dead / "rank-00000.safetensors").write_text("half")
    alive = folders.make_partial(str(tmp_path / "a"))
    try:
        assert not dead.exists()
        hp.save(tmp_path / "a", model=net())
        assert sorted(os.listdir(tmp_path)) == ["a", Path(alive.path).name]
    finally:
        alive.close()


def test_two_jobs_that_save_to_one_place_leave_one_of_the_two_whole(tmp_path: Path) -> None:
    assert processes.pool("none", 1).run(killed_checkpoints.two_jobs, str(tmp_path))[0] in (1, 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "pwrite", "fsync", "rename"])
def test_a_disk_that_refuses_leaves_the_old_checkpoint(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    hp.save(tmp_path / "a", model=model, extra="old")
    (module, name) = (rank_file, call) if call in ("pwrite", "fsync") else (folders, call)
    stand_in = _Os(name, number, after=1 if call == "open" else 0)
    monkeypatch.setattr(module, "os", stand_in)
    with pytest.raises(OSError, match="not saved") as raised:
        hp.save(tmp_path / "a", model=net(1), extra="new")
    monkeypatch.undo()
    assert raised.value.errno == number
    assert stand_in.num_calls > 0
    assert hp.load(tmp_path / "a", model=net(2)) == "old"
    assert os.listdir(tmp_path) == ["a"]


class _Os:
    """The module `os`, of which one function fails."""

    def __init__(self, name: str, number: int, after: int) -> None:
        self._name, self._number, self._after = name, number, after
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(os, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls <= self._after:
                return getattr(os, name)(*args, **kwargs)
            raise OSError(self._number, os.strerror(self._number))

        return fails


def test_a_place_without_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        hp.load(tmp_path / "none", model=net())
    (tmp_path / "a.partial-0123456789abcdef").mkdir()
    with pytest.raises(FileNotFoundError, match="did not finish is no checkpoint"):
        hp.load(tmp_path / "a.partial-0123456789abcdef", model=net())


# In the background


def test_training_may_change_the_weights_while_they_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(rank_file, "os", _Waiting(go_on))
    model = net()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    saving = hp.save(tmp_path / "a", model=model, background=True)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    assert not saving.is_done
    go_on.set()
    saving.wait()
    assert saving.is_done
    target = net(1)
    hp.load(tmp_path / "a", model=target)
    assert all(torch.equal(value, expected[name]) for name, value in target.state_dict().items())


class _Waiting:
    """The module `os`, whose `pwrite` waits."""

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on

    def __getattr__(self, name: str) -> Any:
        if name != "pwrite":
            return getattr(os, name)

        def wait(*args: Any) -> int:
            if not self._go_on.wait(30):
                raise TimeoutError
            return os.pwrite(*args)

        return wait


def test_a_second_save_waits_for_the_first_and_so_does_a_load(tmp_path: Path) -> None:
    model = net()
    savings = [hp.save(tmp_path / str(step), model=model, extra=step, background=True) for step in range(3)]
    assert [saving.is_done for saving in savings[:2]] == [True, True]
    assert hp.load(tmp_path / "2", model=net(1)) == 2
    assert savings[2].is_done


def test_an_error_in_the_background_is_raised_once_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    for is_waited in (False, True):
        monkeypatch.setattr(rank_file, "os", _Os("pwrite", errno.EIO, after=0))
        saving = hp.save(tmp_path / "a", model=model, background=True)
        if is_waited:
            with pytest.raises(OSError, match="not saved"):
                saving.wait()
            monkeypatch.undo()
        else:
            saving._thread.join()
            monkeypatch.undo()
            with pytest.raises(OSError, match="not saved"):
                hp.save(tmp_path / "b", model=model)
        hp.save(tmp_path / "b", model=model)
    assert os.listdir(tmp_path) == ["b"]


def test_a_process_that_ends_waits_for_its_save(tmp_path: Path) -> None:
    program = """
import os, sys, time
from support import killed_checkpoints as ranks
from hyper_parallel.core.parallel.saving import rank_file, save
def slow(name, function, args):
    time.sleep(0.5 if name == "ftruncate" else 0)
    return function(*args)
rank_file.os = ranks._Watched(slow)
with ranks.as_rank(0, 1, None):
    save.save(sys.argv[1], model=ranks.Arrays(7, 0, 1), extra=7, background=True)
assert not os.path.exists(sys.argv[1])
"""
    said = processes.run_program([sys.executable, "-c", program, str(tmp_path / "a")], deadline_s=60)
    assert killed_checkpoints.content_of(str(tmp_path / "a")) == 7
    assert "not saved" not in said
    failing = program.replace("return function(*args)", 'raise OSError(5, "Input/output error")').replace("0.5", "0")
    said = processes.run_program([sys.executable, "-c", failing, str(tmp_path / "b")], deadline_s=60)
    assert f"the checkpoint {tmp_path / 'b'} was not saved" in said
    assert os.listdir(tmp_path) == ["a"]
