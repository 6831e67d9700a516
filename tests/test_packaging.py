"""The package works from a clone, an editable install and a wheel, and never installs `models`."""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("models", "pallas_kernels", "converters")
FOLDERS = ("jaxllm", *LINKED)
FILES = ("pyproject.toml", "README.md", "LICENSE")

IMPORTS = f"""
import importlib, pathlib, sys
import jaxllm, jaxllm.models.batch, jaxllm.pallas_kernels, jaxllm.converters
home = pathlib.Path(sys.argv[1]).resolve()
assert pathlib.Path(jaxllm.__file__).resolve().is_relative_to(home), jaxllm.__file__
assert pathlib.Path(jaxllm.models.batch.__file__).resolve().is_relative_to(home)
for name in {LINKED!r}:
    try:
        importlib.import_module(name)
    except (ModuleNotFoundError, AssertionError):
        continue
    sys.exit(f"import {{name}} works, and must not")
"""


def run(*command: str | Path, cwd: Path, **kwargs) -> str:
    """The command's output; its errors are shown when it fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, **kwargs
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of the tree, links kept, so that builds leave nothing in the real one."""
    copy = tmp_path_factory.mktemp("source")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=skip)
    for file in FILES:
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def archives(source, tmp_path_factory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture
def environment(tmp_path) -> Path:
    """An empty virtual environment that sees this one's packages, but no install of jaxllm.

    A .pth file inside a folder that was itself added by a .pth file is not read, so this one's
    editable install stays out of sight.
    """
    place = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    packages = next((place / "lib").glob("python*")) / "site-packages"
    (packages / "host.pth").write_text(sysconfig.get_path("purelib"))
    return place


def install(environment: Path, *arguments: str | Path) -> None:
    run(
        sys.executable, "-m", "pip", "--python", environment / "bin" / "python", "install",
        "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", *arguments,
        cwd=environment,
    )  # fmt: skip


def tree(root: Path) -> set[str]:
    """The files that an install must hold, under their installed names."""
    found = set()
    for folder in FOLDERS:
        for base, _, names in os.walk(root / folder):
            for name in names:
                path = Path(base, name).relative_to(root)
                if path.suffix in (".py", ".json", ".typed"):
                    found.add(path.as_posix() if folder == "jaxllm" else f"jaxllm/{path}")
    return found


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_clone_works_without_an_install(tmp_path):
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, "clone", cwd=tmp_path)
    clone = tmp_path / "clone"
    run(
        sys.executable, "-c", IMPORTS, clone,
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(clone)},
    )  # fmt: skip


def test_editable_install_follows_the_tree(source, environment):
    install(environment, "--editable", source)
    python = environment / "bin" / "python"
    run(python, "-c", IMPORTS, source, cwd=environment)
    (source / "models" / "added_later.py").write_text("VALUE = 7\n")
    script = "from jaxllm.models.added_later import VALUE; print(VALUE)"
    try:
        assert run(python, "-c", script, cwd=environment) == "7\n"
    finally:
        (source / "models" / "added_later.py").unlink()


def test_wheel_works_elsewhere_and_installs_no_models(archives, environment):
    _, wheel = archives
    install(environment, wheel)
    run(environment / "bin" / "python", "-c", IMPORTS, environment, cwd=environment)
    run(environment / "bin" / "python", "-c", "import jaxllm.engine", cwd=environment)


@pytest.mark.parametrize("built_from", ["sdist", "tree"])
def test_wheel_holds_the_whole_tree_and_nothing_else(source, archives, tmp_path, built_from):
    _, wheel = archives
    if built_from == "tree":
        command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source)
        run(sys.executable, *command, cwd=tmp_path)
        wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
    metadata = {name for name in names if ".dist-info/" in name}
    assert names - metadata == tree(source)
    assert any(name.endswith("licenses/LICENSE") for name in metadata)


def test_wheel_metadata_names_license_python_and_no_torch(archives):
    _, wheel = archives
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if name.endswith("METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
    needs = metadata.get_all("Requires-Dist", [])
    at_run_time = [need for need in needs if "extra ==" not in need]
    assert at_run_time
    assert not [need for need in at_run_time if need.startswith(("torch", "accelerate"))]
    assert [need for need in needs if need.startswith("jax[cuda13]") and "cuda" in need]


def test_sdist_holds_the_folders_as_real_files(archives):
    sdist, _ = archives
    with tarfile.open(sdist) as file:
        members = {member.name.split("/", 1)[-1]: member for member in file.getmembers()}
    for name in ("jaxllm/models/batch.py", "jaxllm/converters/__init__.py", "pyproject.toml"):
        assert members[name].isfile()
    assert not [member for member in members.values() if member.issym() or member.islnk()]
