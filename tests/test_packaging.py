"""What is shipped, and what an installation exposes."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "grpo_lit"
LINKS = ("callbacks", "configs", "datamodules", "kernels")


def run_python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter elsewhere, without what pytest or the caller put on its path."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")} | environment
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


# What is shipped


class Built(NamedTuple):
    wheel: set[str]
    """Names of the files in the wheel."""
    entry_points: str
    metadata: str
    sdist: set[str]
    """Names of the files in the source archive, without its top folder."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The source archive, and the wheel built from that archive alone: so both are complete."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    source.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
    files = ["pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"]
    files += ["Makefile", "constraints.txt"]
    for name in (*files, "grpo_lit", "tests", "scripts", *LINKS):
        entry = ROOT / name
        if entry.is_symlink():
            (source / name).symlink_to(os.readlink(entry))
        elif entry.is_dir():
            shutil.copytree(entry, source / name, symlinks=True, ignore=skipped)
        elif entry.exists():
            shutil.copy(entry, source / name)
    # The backend itself, not pip: no index and no build environment is needed.
    build = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
    done = run_python("-c", build, "build_sdist", str(work), cwd=source)
    assert done.returncode == 0, done.stderr
    archive = work / done.stdout.splitlines()[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(work / "unpacked", **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (top,) = (work / "unpacked").iterdir()
    done = run_python("-c", build, "build_wheel", str(work), cwd=top)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(work / done.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
        (info,) = {n.split("/")[0] for n in names if ".dist-info/" in n}
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
        metadata = wheel.read(f"{info}/METADATA").decode()
    with tarfile.open(archive) as tar:
        sdist = {m.name.partition("/")[2] for m in tar.getmembers() if m.isfile()}
    return Built(names, entry_points, metadata, sdist)


def package_files() -> set[str]:
    """Files of the package in the checkout, relative to its root."""
    found = set()
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            found.add(path.relative_to(ROOT).as_posix())
    return found


def test_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    shipped = {n for n in built.wheel if ".dist-info/" not in n}
    assert shipped == package_files()
    assert "grpo_lit/py.typed" in shipped
    assert "grpo_lit/configs/quickstart.yaml" in shipped
    assert any(n.startswith("grpo_lit/assets/") and n.endswith(".safetensors") for n in shipped)


def test_wheel_metadata(built: Built, pyproject: dict[str, Any]) -> None:
    assert "grpo-lit = grpo_lit.cli:main" in built.entry_points.splitlines()
    lines = built.metadata.splitlines()
    assert "License-Expression: Apache-2.0" in lines
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in built.wheel)
    (version,) = (line.split()[1] for line in lines if line.startswith("Version: "))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.M)
    assert newest is not None
    assert newest[1] == version


def test_sdist_can_be_tested(built: Built) -> None:
    assert {"constraints.txt", "LICENSE", "README.md", "Makefile", "tests/conftest.py"} <= built.sdist
    assert package_files() <= built.sdist
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    assert tests <= built.sdist
    assert not [n for n in built.sdist if n.split("/")[0] in LINKS]


def test_no_shipped_file_is_above_2_mb() -> None:
    large = {n: s for n in package_files() if (s := (ROOT / n).stat().st_size) > 2 * 1024**2}
    assert not large


# The links at the root


@pytest.mark.parametrize("name", LINKS)
def test_root_link_is_relative_and_points_into_the_package(name: str) -> None:
    link = ROOT / name
    assert link.is_symlink(), f"{name} is not a link"
    assert os.readlink(link) == f"grpo_lit/{name}"
    assert link.is_dir()


def test_other_packages_are_unharmed_in_the_root() -> None:
    """`kernels` is also a distribution of Hugging Face's that transformers and bitsandbytes look for."""
    code = """
import sys
from importlib.util import find_spec
import transformers, bitsandbytes
from transformers.utils import is_kernels_available
import transformers.integrations.hub_kernels
assert find_spec("kernels") is not None, "the root is not on sys.path, so this test shows nothing"
print(is_kernels_available(), sorted(m for m in sys.modules if m.split(".")[0] == "grpo_lit"))
import grpo_lit, grpo_lit.kernels
assert grpo_lit.kernels.__all__
"""
    inside = run_python("-c", code, cwd=ROOT)
    assert inside.returncode == 0, inside.stderr
    usable, loaded = inside.stdout.split(maxsplit=1)
    assert loaded == "[]\n", f"importing transformers in the root loaded our ops too: {loaded}"
    if not importlib.metadata.packages_distributions().get("kernels"):
        assert usable == "False"


def test_two_checkouts_on_the_path_do_not_step_aside_for_each_other(tmp_path: Path) -> None:
    for checkout in ("one", "two"):
        (tmp_path / checkout / "kernels").mkdir(parents=True)
        for name in ("__init__.py", "_root_link.py"):
            shutil.copy(ROOT / "grpo_lit" / "kernels" / name, tmp_path / checkout / "kernels" / name)
    done = subprocess.run(
        [sys.executable, "-c", "import kernels; print(kernels.__version__)"],
        cwd=tmp_path / "one",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "two")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "0\n", done.stderr[-500:]


def test_installed_kernels_distribution_wins_over_the_root_link(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("from kernels.hub import get_kernel\n")
    (tmp_path / "kernels" / "hub.py").write_text("def get_kernel():\n    return 'theirs'\n")
    code = f"""
import sys
sys.path.append({str(tmp_path)!r})
from kernels import get_kernel
import kernels.hub
print(get_kernel(), kernels.hub.__file__)
import grpo_lit.kernels
print(grpo_lit.kernels.__name__)
"""
    done = run_python("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["theirs", str(tmp_path / "kernels" / "hub.py"), "grpo_lit.kernels"]


@pytest.mark.parametrize("name", LINKS)
def test_installation_exposes_no_bare_name(name: str, tmp_path: Path) -> None:
    code = f"from importlib.util import find_spec; s = find_spec({name!r}); print(s.origin if s else None)"
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    origin = done.stdout.strip()
    assert origin == "None" or not Path(origin).resolve().is_relative_to(ROOT)


def test_module_runs_in_the_root() -> None:
    done = run_python("-m", "grpo_lit", "--help", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for command in ("fit", "validate", "check", "generate"):
        assert re.search(rf"^\s+{command}\s", done.stdout, re.M), f"--help has no line for {command}"
