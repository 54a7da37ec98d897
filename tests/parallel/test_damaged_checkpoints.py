"""A checkpoint that was changed in any byte, cut, or put together from two, is refused, and the model is as it was."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import DamagedFileError
from hyper_parallel.core.parallel.saving import load
from hyper_parallel.platform.tensor_file import open_tensors
from support import killed_checkpoints as ranks
from support import processes
from support.campaign import share

NUM_RANKS = 2


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same model at two steps, saved by two ranks."""
    base = tmp_path_factory.mktemp("steps")
    processes.pool("none", 1).run(ranks.save_steps, str(base), NUM_RANKS)
    return [base / "1", base / "2"]


def flip(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def overwrite(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    content[at : at + 8] = bytes(byte ^ 0x5A for byte in content[at : at + 8])
    path.write_bytes(content)


def cut(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 9)))


def swap_blocks(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    size = rng.randint(4, 64)
    while True:
        first, second = rng.randrange(len(content) - size), rng.randrange(len(content) - size)
        if abs(first - second) >= size and content[first : first + size] != content[second : second + size]:
            break
    content[first : first + size], content[second : second + size] = (
        content[second : second + size],
        content[first : first + size],
    )
    path.write_bytes(content)


def take_from_other_step(rng: random.Random, files: list[Path], other: Path) -> None:
    path = rng.choice(files)
    shutil.copy(other / path.name, path)


def swap_ranks(rng: random.Random, files: list[Path], other: Path) -> None:
    first, second = (path for path in files if path.suffix == ".safetensors")
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def remove(rng: random.Random, files: list[Path], other: Path) -> None:
    rng.choice(files).unlink()


DAMAGES: list[Callable[[random.Random, list[Path], Path], None]] = [
    flip, flip, flip, overwrite, cut, cut, lengthen, swap_blocks, take_from_other_step, swap_ranks, remove,
]  # fmt: skip


@pytest.fixture(scope="module")
def campaign(steps: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    return steps, tmp_path_factory.mktemp("damaged") / "ckpt"


def test_every_damage_is_found_and_nothing_of_it_is_loaded(campaign: tuple[list[Path], Path]) -> None:
    (first, second), damaged = campaign
    untouched = ranks.Arrays(5, 0, 1)
    for seed in share(10_000, 400):
        rng = random.Random(seed)
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(first, damaged)
        damage = DAMAGES[seed % len(DAMAGES)]
        damage(rng, sorted(damaged.iterdir()), second)
        if damage is take_from_other_step and is_whole_other(damaged, second):
            continue
        with ranks.as_rank(0, 1, None):
            model = ranks.Arrays(5, 0, 1)
            with pytest.raises((DamagedFileError, FileNotFoundError)) as raised:
                load.load(damaged, model=model)
        assert isinstance(raised.value, DamagedFileError) or not (damaged / "manifest.json").exists(), seed
        for name, (array, _, _) in model.arrays.items():
            assert np.array_equal(array, untouched.arrays[name][0]), (seed, name)
        with pytest.raises((DamagedFileError, FileNotFoundError)):
            hp.verify(damaged)


def is_whole_other(damaged: Path, other: Path) -> bool:
    return all((damaged / path.name).read_bytes() == path.read_bytes() for path in other.iterdir())


def test_every_single_bit_of_a_manifest_and_of_a_rank_s_header_counts(campaign: tuple[list[Path], Path]) -> None:
    (first, _), damaged = campaign
    shutil.rmtree(damaged, ignore_errors=True)
    shutil.copytree(first, damaged)
    path = damaged / "rank-00001.safetensors"
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for bit in share(8 * header, 300):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            hp.verify(damaged)
    path.write_bytes(content)
    assert hp.verify(damaged).num_files == NUM_RANKS


def test_rank_files_are_sealed_files_that_other_programs_read(steps: list[Path]) -> None:
    from safetensors.numpy import load_file

    found = load_file(steps[0] / "rank-00000.safetensors")
    assert any(name.startswith("model/a[0:3") for name in found), sorted(found)
    with open_tensors(steps[0] / "rank-00000.safetensors") as file:
        assert file.verified
        assert len(file.read_all()) == len(found)
