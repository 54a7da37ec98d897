"""The wheel: what is in it, and that it can be used with NumPy alone."""

from __future__ import annotations

import email
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hyper_parallel import __version__

ROOT = Path(__file__).resolve().parents[2]

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("nothing to build here: not a checkout", allow_module_level=True)
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_is_for_every_python_and_system_and_has_the_version(wheel: Path) -> None:
    assert wheel.name == f"hyper_parallel-{__version__}-py3-none-any.whl"


def test_all_of_the_package_is_in_it_and_nothing_else(names: list[str]) -> None:
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "hyper_parallel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if not name.startswith(f"hyper_parallel-{__version__}.dist-info/")} == expected
    assert "hyper_parallel/py.typed" in expected
    assert "hyper_parallel/platform/outcomes.json" in expected


def test_its_metadata_names_numpy_alone_the_extras_the_licence_and_the_command(wheel: Path) -> None:
    folder = f"hyper_parallel-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        about = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        commands = archive.read(f"{folder}/entry_points.txt").decode()
        assert f"{folder}/licenses/LICENSE" in archive.namelist()
    needed = [each for each in about.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert (about["Author"], about["License"]) == ("The hyper_parallel authors", "Apache-2.0")
    assert needed == ["numpy>=1.24"]
    assert {"torch", "mindspore", "planner", "cli", "files", "all"} <= set(about.get_all("Provides-Extra", []))
    assert "hyper-parallel = hyper_parallel.cli:main" in commands


def test_it_can_be_imported_with_numpy_alone(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = f"""
import importlib.abc, json, sys
sys.path.insert(0, {str(tmp_path)!r})

class NumpyAlone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "hyper_parallel"):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=top)

sys.meta_path.insert(0, NumpyAlone())
import hyper_parallel as hp

used = [hp.CheckpointPolicy.MUST_SWAP.name, str(hp.policies.save(hp.policies.matmuls))]
mesh = hp.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
used.append(str(hp.Layout(mesh, ("dp", None)).placements))
try:
    hp.get_platform()
except ImportError as error:
    used.append(str(error))
print(json.dumps([hp.__file__, used]))
"""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HYPER_PARALLEL"))
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    where, used = json.loads(done.stdout.splitlines()[-1])
    assert where.startswith(str(tmp_path))
    assert used[:3] == ["MUST_SWAP", "save matmuls; recompute the rest", "(Shard(0), Replicate())"]
    assert "pip install 'torch>=2.8'" in used[3]
