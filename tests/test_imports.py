"""Who may import whom, and whether what is imported is declared."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
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


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


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
