"""The house: links, floors and what each room may import. See docs/layout.md."""

import ast
import importlib
import os
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxllm.converters.architectures import NAME_MAPS
from jaxllm.models.registry import resolve, supported_architectures

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("models", "pallas_kernels", "converters")
PACKAGE_FOLDERS = ("jaxllm", *LINKED)
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Beside the standard library and the rooms below, a room imports only these.
ALLOWED_IMPORTS = {
    "pallas_kernels": {"jax", "jaxlib", "jaxtyping", "numpy"},
    "models": {"jax", "flax", "jaxtyping", "numpy"},
    "jaxllm/scheduler": {"numpy", "msgspec", "xxhash"},
}
# nnx declares in models/; turning a declaration into plain parameters is one file's matter.
NNX_IN_MODELS = {"Module", "Param", "List"}
NNX_IN_WEIGHTS = (
    NNX_IN_MODELS
    | {"eval_shape", "split", "merge", "state", "GraphDef", "State"}
    | {
        "to_flat_state",
        "to_pure_dict",
        "update",
    }
)


def python_files(*folders: str) -> list[Path]:
    """The .py files under `folders`, each once: links are not followed."""
    found = []
    for folder in folders:
        for base, _, names in os.walk(ROOT / folder):
            found += [Path(base, name) for name in names if name.endswith(".py")]
    return sorted(found)


def imports(path: Path) -> set[str]:
    """The dotted names of all modules that a file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            names.add(node.module or "")
    return names


def run(*command: str, cwd: Path = ROOT, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.mark.parametrize("name", LINKED)
def test_package_folder_is_a_relative_link(name):
    link = ROOT / "jaxllm" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir()
    assert not (ROOT / name).is_symlink()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_holds_the_links_as_links():
    listed = run("git", "ls-files", "-s", *(f"jaxllm/{name}" for name in LINKED)).stdout
    assert {line.split()[0] for line in listed.splitlines()} == {"120000"}
    assert len(listed.splitlines()) == len(LINKED)


@pytest.mark.parametrize("name", LINKED)
def test_bare_import_is_refused(name):
    done = run(sys.executable, "-c", f"import {name}")
    assert done.returncode != 0
    assert f"import jaxllm.{name}, not {name}" in done.stderr


def test_ruff_bans_the_bare_names():
    source = "".join(f"import {name}\nfrom {name} import x\n" for name in LINKED)
    done = run(
        sys.executable, "-m", "ruff", "check", "--stdin-filename", "jaxllm/x.py",
        "--select", "TID251", "--output-format", "concise", "-", input=source,
    )  # fmt: skip
    assert done.stdout.count("TID251") == 2 * len(LINKED)


def test_pyright_descends_the_links():
    assert {f"jaxllm/{name}" for name in LINKED} <= set(SETTINGS["tool"]["pyright"]["include"])


def test_every_room_stands_on_a_floor():
    floors = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {room.strip(" ()") for floor in floors for room in floor.replace(":", "|").split("|")}
    rooms = {
        f"jaxllm.{path.stem}"
        for path in (ROOT / "jaxllm").iterdir()
        if path.name != "__init__.py" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    assert rooms <= named


def test_import_linter_sees_through_the_links(tmp_path):
    for folder in PACKAGE_FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "models" / "upward.py").write_text("import jaxllm.engine\n")
    (tmp_path / "pallas_kernels" / "sideways.py").write_text("import flax\n")
    (tmp_path / "converters" / "heavy.py").write_text("def f():\n    import torch\n")
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run(sys.executable, "-c", script, cwd=tmp_path, env=environment)
    report = " ".join(done.stdout.split())
    assert done.returncode == 1
    for chain in (
        "jaxllm.models.upward -> jaxllm.engine",
        "jaxllm.pallas_kernels.sideways -> flax",
        "jaxllm.converters.heavy -> torch",
    ):
        assert chain in report


@pytest.mark.parametrize("folder", ALLOWED_IMPORTS)
def test_room_imports_only_what_it_may(folder):
    allowed = ALLOWED_IMPORTS[folder] | sys.stdlib_module_names | {"jaxllm"}
    extra = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files(folder)
        for name in imports(path)
        if name.split(".")[0] not in allowed
    }
    assert not extra


def test_torch_is_imported_in_tests_and_scripts_only():
    users = [p for p in python_files(*PACKAGE_FOLDERS) for n in imports(p) if n[:5] == "torch"]
    assert not users


def test_every_module_imports_without_torch():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in python_files(*PACKAGE_FOLDERS)
    ]
    names = [m if m.startswith("jaxllm") else f"jaxllm.{m}" for m in modules]
    names = [m.removesuffix(".__init__") for m in names if not m.endswith("__main__")]
    script = (
        "import importlib, sys\nsys.modules['torch'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    done = run(sys.executable, "-c", script)
    assert done.returncode == 0, done.stderr


def architecture_files() -> dict[str, str]:
    """Class name …ForCausalLM -> the stem of the file in models/ that defines it."""
    return {
        node.name: path.stem
        for path in (ROOT / "models").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("ForCausalLM")
    }


def test_every_model_is_registered_and_has_a_name_map_of_its_own():
    files = architecture_files()
    assert set(files) == set(supported_architectures()) == set(NAME_MAPS)
    for architecture, stem in files.items():
        data = importlib.import_module(f"jaxllm.converters.{stem}")
        assert NAME_MAPS[architecture] is data.NAME_MAP
        assert resolve([architecture]).__module__ == f"jaxllm.models.{stem}"


def test_nnx_is_used_to_declare_only():
    wrong = []
    for path in python_files(*PACKAGE_FOLDERS):
        relative = path.relative_to(ROOT).as_posix()
        allowed = NNX_IN_WEIGHTS if relative == "jaxllm/runner/weights.py" else NNX_IN_MODELS
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
                continue
            if node.value.id == "nnx" and node.attr not in allowed:
                wrong.append(f"{relative}:{node.lineno}: nnx.{node.attr}")
    assert not wrong


def test_ci_runs_the_readme_test_command():
    script = ROOT / ".ci" / "run"
    commands = [line for line in script.read_text().splitlines() if line.startswith("exec ")]
    assert commands == ["exec make test"]
    assert script.stat().st_mode & stat.S_IXUSR


def test_readme_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text()
    first_block = text.split("```")[1]
    assert "make demo" in first_block
    assert "make test" in first_block


def test_records_are_there():
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
