"""What is shipped, what it needs, and who may import whom."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


# Who imports whom


class Import(NamedTuple):
    importer: str
    """Dotted module name."""
    target: str
    """Dotted name imported; of `from a import b` both a and a.b are listed."""
    at_module_level: bool
    """Runs whenever the module is imported: outside functions, `try` and `if TYPE_CHECKING`."""
    line: int


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    importer = module_name(path)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]

    def walk(node: ast.AST, always: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, always, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            yield Import(importer, base, always, node.lineno)
            for alias in node.names:
                yield Import(importer, f"{base}.{alias.name}", always, node.lineno)
        optional = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Try)
        if isinstance(node, ast.If):
            optional = "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, always and not optional)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), True)


SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(p) for p in SOURCES}
IMPORTS = [i for p in SOURCES for i in imports_of(p)]

# Imports point one way: a module may reach those of its own height and below. Modules not named here have no
# height of their own, but what they import counts for whoever imports them.
HEIGHTS = {"kernels": 0, "loss": 1, "lora": 2, "policy": 2, "rewards": 2, "rollout": 2, "module": 3, "cli": 4}


def room(module: str) -> str:
    """`grpo_lit.rollout.hf` -> `rollout`; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def reachable() -> dict[str, set[str]]:
    """For each module, those of the package that it imports, directly or through others."""
    edges: dict[str, set[str]] = {m: set() for m in MODULES}
    for i in IMPORTS:
        if i.target in MODULES and i.target != "grpo_lit":
            edges[i.importer].add(i.target)
    found: dict[str, set[str]] = {}
    for start in MODULES:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in edges[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        found[start] = seen
    return found


def test_import_walk_sees_this_package() -> None:
    # An empty walk would satisfy all tests below.
    assert {"grpo_lit.loss", "grpo_lit.kernels", "grpo_lit.cli", "grpo_lit.module"} <= MODULES
    reached = reachable()
    assert "grpo_lit.loss" in reached["grpo_lit.module"]
    of_the_command_line = {room(t) for m in MODULES if room(m) == "cli" for t in reached[m]}
    assert of_the_command_line >= {"module", "policy", "loss", "kernels"}


def test_imports_point_one_way() -> None:
    wrong = []
    for module, targets in reachable().items():
        height = HEIGHTS.get(room(module))
        for target in targets:
            if height is not None and HEIGHTS.get(room(target), -1) > height:
                wrong.append(f"{module} reaches {target}")
    assert not sorted(wrong)


def test_callbacks_and_datamodules_stay_apart() -> None:
    # Direct imports: through the module, which knows the batches it is given, callbacks do reach datamodules.
    forbidden = {"callbacks": {"datamodules", "cli"}, "datamodules": {"callbacks", "cli"}}
    wrong = [i for i in IMPORTS if room(i.target) in forbidden.get(room(i.importer), ())]
    assert not wrong
    wrong_through_others = [
        f"{module} reaches {target}"
        for module, targets in reachable().items()
        for target in targets
        if room(module) in forbidden and room(target) == "cli"
    ]
    assert not wrong_through_others


def test_only_the_entry_points_import_the_command_line() -> None:
    entries = ("cli", "__main__", "bench", "tune", "testing")  # the last three run other commands
    wrong = [i for i in IMPORTS if room(i.target) == "cli" and room(i.importer) not in entries]
    assert not wrong


def test_loss_and_kernels_know_no_trainer() -> None:
    outside = {"lightning", "pytorch_lightning", "transformers", "datasets", "peft"}
    wrong = [i for i in IMPORTS if room(i.importer) in ("loss", "kernels") and i.target.split(".")[0] in outside]
    assert not wrong


def test_nothing_imports_through_the_root_links() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    wrong = [i for p in files for i in imports_of(p) if i.target.split(".")[0] in LINKS]
    assert not wrong


# What it needs


def distribution(module: str, known: dict[str, list[str]]) -> set[str]:
    """Names of the distributions that bring a top-level module, as pyproject.toml would write them."""
    return {canonicalize_name(d) for d in known.get(module, [module])}


# Served by an extra and imported only when asked for, as a whole.
OPTIONAL_PACKAGES = ("grpo_lit.live.app",)


def is_optional(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in OPTIONAL_PACKAGES)


def test_optional_packages_are_imported_only_where_they_are_needed() -> None:
    wrong = [i for i in IMPORTS if i.at_module_level and is_optional(i.target) and not is_optional(i.importer)]
    assert not wrong


def test_every_import_is_declared(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    base = {canonicalize_name(Requirement(r).name) for r in project["dependencies"]}
    extras = {canonicalize_name(Requirement(r).name) for rs in project["optional-dependencies"].values() for r in rs}
    known = dict(importlib.metadata.packages_distributions())
    wrong = []
    for i in IMPORTS:
        top = i.target.split(".")[0]
        if top == "grpo_lit" or top in sys.stdlib_module_names:
            continue
        allowed = base if i.at_module_level and not is_optional(i.importer) else base | extras
        if not distribution(top, known) & allowed:
            wrong.append(f"{i.importer}:{i.line} imports {top}")
    assert not sorted(set(wrong))


def constraints() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def test_constraints_fit_the_declared_bounds(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    declared = [Requirement(r) for rs in project["optional-dependencies"].values() for r in rs]
    declared += [Requirement(r) for r in project["dependencies"]]
    pins: dict[str, list[str]] = {}
    for pin in constraints():
        (specifier,) = pin.specifier
        assert specifier.operator == "==", f"{pin} pins nothing"
        pins.setdefault(canonicalize_name(pin.name), []).append(specifier.version)
    for requirement in declared:
        name = canonicalize_name(requirement.name)
        if name == "grpo-lit" or name == "setuptools":
            continue
        assert name in pins, f"{requirement.name} has no line in constraints.txt"
        assert all(requirement.specifier.contains(v) for v in pins[name]), f"{requirement} against {pins[name]}"


def test_constraints_agree_with_what_torch_asks_for() -> None:
    """CUDA builds of torch pin Triton; with another pin here nothing installs on a GPU machine."""
    (torch_pin,) = (p for p in constraints() if p.name == "torch")
    if importlib.metadata.version("torch").partition("+")[0] not in str(torch_pin.specifier):
        pytest.skip("another torch than the one in constraints.txt is installed")
    asked = [Requirement(r) for r in importlib.metadata.requires("torch") or [] if r.startswith("triton")]
    if not asked:
        pytest.skip("the installed build of torch asks for no Triton")
    (triton_pin,) = (p for p in constraints() if p.name == "triton")
    (version,) = (s.version for s in triton_pin.specifier)
    assert all(r.specifier.contains(version) for r in asked)


def test_pre_commit_runs_the_versions_of_the_constraints() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    pinned = {p.name: str(p.specifier) for p in constraints()}
    used = {Requirement(d) for r in config["repos"] for h in r["hooks"] for d in h["additional_dependencies"]}
    shared = [d for d in used if d.name in pinned]
    assert {d.name for d in shared} >= {"ruff", "codespell"}
    assert all(str(d.specifier) == pinned[d.name] for d in shared)
