"""Checkpoints to and from Hugging Face's folders and PyTorch's own, and the command."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.cli import app as command
from hyper_parallel.core.parallel.saving import hugging_face
from hyper_parallel.platform import selection
from support import processes

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # DCP, of a process alone


@pytest.fixture(autouse=True)
def _on_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    yield
    selection._forget()


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))  # stacked
        self.norm = nn.LayerNorm(4).to(torch.bfloat16)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def bits(model: Any) -> dict[str, bytes]:
    return {name: bytes(value.reshape(-1).view(torch.uint8).numpy()) for name, value in model.state_dict().items()}


def trained(model: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.5, 0.75))
    for value in model.parameters():
        value.grad = torch.randn_like(value)
    optimizer.step()
    return optimizer


# Hugging Face


@pytest.mark.parametrize("shard_bytes", [10_000, 200], ids=["one file", "several"])
def test_a_model_goes_to_hugging_face_and_back_bit_for_bit(
    shard_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(hugging_face, "_SHARD_BYTES", shard_bytes)
    model = Net()
    hp.save(tmp_path / "a", model=model, optimizer=trained(model))
    hp.export_hugging_face(tmp_path / "a", tmp_path / "hf")
    files = [name for name in os.listdir(tmp_path / "hf") if name.endswith(".safetensors")]
    assert ("model.safetensors" in files) == (shard_bytes == 10_000)
    theirs = {name: value for file in files for name, value in load_file(tmp_path / "hf" / file).items()}
    assert sorted(theirs) == ["embed.weight", "experts", "norm.bias", "norm.weight"]  # the tied one once
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in theirs.items())
    if len(files) > 1:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert sorted(index["weight_map"]) == sorted(theirs)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in theirs.values())
    again = Net(1)
    hp.import_hugging_face(tmp_path / "hf", model=again)
    assert bits(again) == bits(model)
    assert again.head.weight is again.embed.weight


def test_weights_that_transformers_saved_are_imported_and_those_exported_it_loads(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="1KB")
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    hp.import_hugging_face(tmp_path / "hf", model=model)
    assert bits(model) == bits(theirs)
    hp.save(tmp_path / "a", model=model)
    hp.export_hugging_face(tmp_path / "a", tmp_path / "out")
    config.save_pretrained(tmp_path / "out")
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert bits(back) == bits(theirs)


def test_a_folder_with_weights_is_not_written_to_and_a_damaged_one_not_read(tmp_path: Path) -> None:
    model = Net()
    hp.save(tmp_path / "a", model=model)
    hp.export_hugging_face(tmp_path / "a", tmp_path / "hf")
    with pytest.raises(ValueError, match="has weights already"):
        hp.export_hugging_face(tmp_path / "a", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    again = Net(1)
    before = bits(again)
    with pytest.raises(DamagedFileError):
        hp.import_hugging_face(tmp_path / "hf", model=again)
    assert bits(again) == before
    with pytest.raises(FileNotFoundError, match="no weights"):
        hp.import_hugging_face(tmp_path, model=again)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    hp.save(tmp_path / "a", model=Net())
    path = tmp_path / "a" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError):
        hp.export_hugging_face(tmp_path / "a", tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == []


def _import_on_ranks(folder: str) -> bool:
    from support.process_worker import keep_platform_groups

    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected, net = Net(), Net(1)
    plan = hp.ShardPlan(parameters={"experts": (None, "dp", None), "embed.weight": ("dp", None)})
    sharded = hp.shard_module(net, mesh, plan)
    hp.import_hugging_face(folder, model=sharded, timeout=20)
    found = all(
        torch.equal(value.full_tensor() if isinstance(value, hp.DTensor) else value, expected.state_dict()[name])
        for name, value in sharded.state_dict().items()
    )
    keep_platform_groups()
    return found


def test_each_rank_imports_its_part(tmp_path: Path) -> None:
    hp.save(tmp_path / "a", model=Net())
    hp.export_hugging_face(tmp_path / "a", tmp_path / "hf")
    assert processes.pool("torch", 2).run(_import_on_ranks, str(tmp_path / "hf"), deadline_s=60) == [True, True]


# PyTorch's DCP


def test_a_checkpoint_goes_to_dcp_and_back_with_its_optimizer(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = Net()
    optimizer = trained(model)
    hp.save(tmp_path / "a", model=model, optimizer=optimizer, extra={"step": 3, "at": (1, 2)})
    hp.convert(tmp_path / "a", tmp_path / "dcp")
    theirs = Net(1)
    their_optimizer = trained(theirs)
    weights, state = get_state_dict(theirs, their_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(theirs, their_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert bits(theirs) == bits(model)
    assert _same_state(their_optimizer, optimizer)
    hp.convert(tmp_path / "dcp", tmp_path / "b")
    again = Net(2)
    fresh = torch.optim.Adam(again.parameters(), lr=0.7)
    assert hp.load(tmp_path / "b", model=again, optimizer=fresh) == {"step": 3, "at": (1, 2)}
    assert bits(again) == bits(model)
    assert _same_state(fresh, optimizer)
    assert fresh.param_groups[0]["betas"] == (0.5, 0.75)


def _same_state(first: Any, second: Any) -> bool:
    pairs = zip(first.state.values(), second.state.values(), strict=True)
    return all(one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one) for one, two in pairs)


def _save_by_dcp(folder: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    from support.process_worker import keep_all_groups, kept_mesh

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(net, mesh=kept_mesh((2,), ("dp",)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.3)
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    weights, state = get_state_dict(net, optimizer)
    dcp.save({"model": weights, "optimizer": state, "epoch": 4}, checkpoint_id=folder)
    hp.save(f"{folder}-ours", model=net, optimizer=optimizer, timeout=20)
    keep_all_groups()


def test_what_two_ranks_saved_by_dcp_is_what_they_save_by_us(tmp_path: Path) -> None:
    processes.pool("torch", 2).run(_save_by_dcp, str(tmp_path / "dcp"), deadline_s=60)
    hp.convert(tmp_path / "dcp", tmp_path / "converted")
    found = []
    for name in ("converted", "dcp-ours"):
        net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.Adam(net.parameters(), lr=0.9)
        extra = hp.load(tmp_path / name, model=net, optimizer=optimizer)
        assert extra == ({"epoch": 4} if name == "converted" else None)
        assert optimizer.param_groups[0]["lr"] == 0.3
        found.append((bits(net), optimizer))
    assert found[0][0] == found[1][0]
    assert _same_state(found[0][1], found[1][1])


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_no_code_of_a_dcp_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.checkpoint as dcp

    monkeypatch.chdir(tmp_path)
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id="dcp", no_dist=True)
    Path("dcp/.metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DamagedFileError, match="mkdir"):
        hp.convert("dcp", "a")
    dcp.save({"model": nn.Linear(2, 2).state_dict(), "extra": {"x": 1}}, checkpoint_id="other", no_dist=True)
    dcp.save({"model": nn.Linear(2, 2).state_dict(), "bad": Bomb}, checkpoint_id="class", no_dist=True)
    with pytest.raises(DamagedFileError, match="more than tensors and plain values"):
        hp.convert("class", "a")
    assert not Path("exploded").exists()
    assert not Path("a").exists()
    hp.convert("other", "a")
    with pytest.raises(ValueError, match="target is there"):
        hp.convert("other", "a")
    with pytest.raises(ValueError, match="could be converted"):
        hp.convert(".", "b")


# The command


def run(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["hyper-parallel", "checkpoint", *words.split()])
    with pytest.raises(SystemExit) as ended:
        command.run()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_verifies_shows_and_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()
    hp.save("a", model=model, optimizer=trained(model), extra={"step": 3})
    code, out, err = run("verify a", monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert "all as written" in out
    assert json.loads(run("verify a --json", monkeypatch, capsys)[1])["num_files"] == 1
    code, out, _ = run("show a", monkeypatch, capsys)
    assert "model/experts" in out
    assert "F32[3, 4, 5], 1 items" in out
    assert "model/head.weight is model/embed.weight" in out
    shown = json.loads(run("show a --json", monkeypatch, capsys)[1])
    assert shown["extra"] == {"step": 3}
    assert shown["groups"][0]["options"]["lr"] == 0.1
    assert run("convert a hf --hugging-face", monkeypatch, capsys)[0] == 0
    assert run("convert a dcp", monkeypatch, capsys)[0] == 0
    assert run("convert dcp back", monkeypatch, capsys)[0] == 0
    assert run("verify back", monkeypatch, capsys)[0] == 0
    path = Path("a/manifest.json")
    path.write_bytes(path.read_bytes().replace(b"experts", b"expertz"))
    code, out, err = run("verify a", monkeypatch, capsys)
    assert (code, out) == (1, "")
    assert "is damaged" in err
    assert run("show nothing", monkeypatch, capsys)[0] == 1
