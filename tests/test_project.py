"""The house: one source of versions, imports that go one way, and notebooks that were run."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_line_of_the_lock_is_one_exact_version():
    for requirement in LOCK:
        assert [s.operator for s in requirement.specifier] == ["=="], str(requirement)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_holds_what_pyproject_asks_for(python):
    environment = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": "linux", "platform_machine": "x86_64",
                   "os_name": "posix", "implementation_name": "cpython", "platform_python_implementation": "CPython"}
    locked = {}
    for requirement in LOCK:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            name = canonical(requirement.name)
            assert name not in locked, f"{name} twice for Python {python}"
            locked[name] = next(iter(requirement.specifier)).version
    project = PYPROJECT["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = Requirement(line)
        assert canonical(wanted.name) in locked, f"{wanted.name} is not in requirements.txt"
        assert wanted.specifier.contains(locked[canonical(wanted.name)]), line
    assert (locked["torch"], locked["triton"]) == ("2.13.0", "3.7.1")  # a pair: torch 2.13 brings this triton


def test_what_is_installed_is_what_the_lock_says():
    for requirement in LOCK:
        if requirement.marker is None or requirement.marker.evaluate():
            installed = metadata.version(requirement.name).split("+")[0]
            assert requirement.specifier.contains(installed, prereleases=True), f"{requirement} but {installed} is installed"


def test_conda_takes_python_and_pip_and_the_same_lock():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    *packages, from_pip = environment["dependencies"]
    assert [re.split(r"[<>=]", p)[0] for p in packages] == ["python", "pip"]
    assert from_pip == {"pip": ["-r requirements.txt", "-e ."]}
    python = Requirement(packages[0])
    supported = Requirement(f"python{PYPROJECT['project']['requires-python']}")
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        assert python.specifier.contains(version) == supported.specifier.contains(version)


def test_kernels_has_no_init():
    """With one, the folder shadows the Hugging Face distribution `kernels`, which transformers looks for, as soon as
    the checkout's root is on sys.path. Linters suggest adding it; mla_lab/kernels.py is the door instead."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not [p for p in (ROOT / "kernels").rglob("*.py") if p.parent != ROOT / "kernels"], "kernels/ is flat"


def test_packages_matches_the_folders():
    tool = PYPROJECT["tool"]["setuptools"]
    assert tool["packages"] == ["mla_lab", "mla_lab.kernels"]
    assert {name: (ROOT / folder).is_dir() for name, folder in tool["package-dir"].items()} == {"mla_lab": True, "mla_lab.kernels": True}
    assert not [p for p in (ROOT / "mla_lab").iterdir() if p.is_dir() and p.name != "__pycache__"]


ORDER = [
    {"formats", "recipe", "kernels", "numerics", "plots", "metrics", "collect"}, {"arch", "cache"}, {"lists"}, {"inputs", "reference"}, {"emulate"}, {"portable"}, {"cdna", "hopper"},
    {"attention"}, {"flashmla", "operator"}, {"study", "compile", "capture", "budget"}, {"floor"}, {"notebook"}, {"runs", "bench", "check"}, {"grid", "tune"}, {"sweep"}, {"cli"},
]
"""Each module imports only from sets before its own (formats comes before metrics within the first)."""


def imported(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mla_lab":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("mla_lab.")}
    return found


def test_imports_go_one_way():
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    modules = {p.stem: p for p in (ROOT / "mla_lab").glob("*.py") if p.stem != "__init__"}
    assert set(modules) == set(rank)
    public = {"Recipe", "flash_mla_sparse_fwd", "merge_parts", "results", "sparse_mla_fwd", "__version__"}
    for name, path in modules.items():
        for other in imported(path):
            if other in public:  # the package's own front: only for what stands behind attention
                assert rank[name] > rank["attention"], f"{name} imports {other} from the front"
            else:
                assert rank[other] < rank[name] or (name, other) == ("metrics", "formats"), f"{name} imports {other}"
    assert imported(modules["formats"]) == imported(modules["recipe"]) == imported(modules["plots"]) == set()


def test_types():
    done = subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", os.devnull], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_notebook_that_is_not_normalised_is_named_and_rewritten(tmp_path):
    tool = [sys.executable, ROOT / "tools" / "normalise_notebooks.py"]
    path = tmp_path / "edited.ipynb"
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    notebook.metadata["widgets"] = {"state": {}}
    notebook.cells[1]["id"] = "0f3a"
    notebook.cells[1].metadata["collapsed"] = True
    nbformat.write(notebook, path)
    call = lambda *options: subprocess.run([*tool, *options, path], capture_output=True, text=True)
    said = call("--check")
    assert said.returncode == 1 and said.stdout == "not normalised: edited.ipynb\n"
    assert call().returncode == 0 and path.read_bytes() == NOTEBOOKS[0].read_bytes()
    assert call("--check").returncode == 0


def test_kernels_import_nothing_of_the_host():
    for path in (ROOT / "kernels").glob("*.py"):
        assert imported(path) <= {"kernels"}, path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_committed_as_they_ran(path):
    """Strict nbval passes a cell that never ran: without a count and outputs there is nothing to compare."""
    assert path.stat().st_size < 400_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code[0].metadata.tags == ["parameters"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert code[-1].outputs, "it ends with what was found"
    for cell in code:
        kinds = [key for output in cell.outputs for key in output.get("data", {})]
        assert not any(output.output_type == "error" for output in cell.outputs)
        # Images are marked as not compared; and what is so marked is an image or says nothing.
        ignored = "nbval-ignore-output" in cell.metadata.get("tags", [])
        assert ("image/png" in kinds) <= ignored
        assert not ignored or "image/png" in kinds or not cell.outputs
        text = str(cell.outputs)
        assert "/home/" not in text and "/root/" not in text and "/tmp/" not in text


def test_there_are_notebooks():
    assert [p.stem[:3] for p in NOTEBOOKS] == [f"{n:02d}_" for n in range(1, len(NOTEBOOKS) + 1)] and len(NOTEBOOKS) >= 2


def test_the_readmes_map_is_true():
    readme = (ROOT / "README.md").read_text()
    block = readme.split("## Where things are", 1)[1].split("```")[1]
    folder, named = "", []
    for line in block.strip().splitlines():
        entry = line.split("  ")[0] if not line.startswith(" ") else line.strip().split("  ")[0]
        folder = "" if not line.startswith(" ") else folder
        for part in entry.split(", "):
            named.append(ROOT / folder / part.strip())
        if entry.endswith("/") and not line.startswith(" "):
            folder = entry
    missing = [str(p.relative_to(ROOT)) for p in named if not p.exists()]
    assert not missing and len(named) > 20
    for name in [p.name for p in (ROOT / "mla_lab").glob("*.py")] + [p.name for p in (ROOT / "kernels").glob("*.py")]:
        assert name == "__init__.py" or name in block, f"{name} is not in the README's map"
