"""Architectures from outside the package: renamed tensors, own classes, entry points."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import jaxllm
from jaxllm import LLM, SamplingParams
from jaxllm.converters import architectures
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import LoadError
from jaxllm.converters.renamed import RenamedCheckpoint, renamed
from jaxllm.models import registry
from tests.converters.tiny_models import save_model
from tests.installed_package import pip_install

ROOT = Path(__file__).resolve().parents[1]
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 8,
    "compilation_cache_dir": "",
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("qwen"), "Qwen2", initializer_range=0.3)


@pytest.fixture(scope="module")
def fin_qwen(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights under another architecture, q_proj called query_proj."""
    folder = tmp_path_factory.mktemp("fin")
    config = json.loads((qwen / "config.json").read_text())
    config |= {"architectures": ["FinQwenForCausalLM"], "model_type": "fin_qwen"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(qwen / "model.safetensors")
    changed = {k.replace(".q_proj.", ".query_proj."): v for k, v in tensors.items()}
    assert changed.keys() != tensors.keys()
    safetensors.numpy.save_file(changed, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def expected(qwen: Path) -> list[int]:
    return tokens_of(qwen)


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TARGETS", dict(registry._TARGETS))
    monkeypatch.setattr(architectures, "_REGISTERED", {})


def tokens_of(folder: Path) -> list[int]:
    llm = LLM(str(folder), **OPTIONS)
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_renamed_architecture_serves_with_one_call(fin_qwen: Path, expected: list[int]) -> None:
    jaxllm.register_model(
        "FinQwenForCausalLM", model="Qwen2ForCausalLM", rename={"query_proj": "q_proj"}
    )
    assert tokens_of(fin_qwen) == expected


def test_without_it_the_error_says_what_is_missing_and_how_to_register(fin_qwen: Path) -> None:
    message = (
        r"FinQwenForCausalLM is not supported\. Did you mean Qwen[23]ForCausalLM.*"
        r'jaxllm\.register_model\("FinQwenForCausalLM", model="Qwen[23]ForCausalLM".*'
        r"entry point of the group jaxllm\.models"
    )
    with pytest.raises(ValueError, match=message):
        LLM(str(fin_qwen), **OPTIONS)


def test_registered_without_the_names_the_report_has_both_and_the_way_out(fin_qwen: Path) -> None:
    jaxllm.register_model("FinQwenForCausalLM", model="Qwen2ForCausalLM")
    with pytest.raises(LoadError) as raised:
        LLM(str(fin_qwen), **OPTIONS)
    text = str(raised.value)
    assert "model.layers.{0..1}.self_attn.q_proj.weight" in text
    assert "model.layers.{0..1}.self_attn.query_proj.weight" in text
    assert "rename=" in text


def test_an_own_class_and_a_last_fix(fin_qwen: Path, expected: list[int]) -> None:
    from jaxllm.models.qwen2 import Qwen2ForCausalLM

    class OwnForCausalLM(Qwen2ForCausalLM):
        pass

    seen: list[Any] = []

    def post_load(params: dict[str, Any], config: Any) -> dict[str, Any]:
        seen.append(config.hidden_size)
        params["model.norm.weight"] = params["model.norm.weight"] * 0
        return params

    own: dict[str, Any] = {
        "model": OwnForCausalLM,
        "name_map": "jaxllm.converters.qwen2:NAME_MAP",
        "rename": {"query_proj": "q_proj"},
    }
    jaxllm.register_model("FinQwenForCausalLM", **own)
    assert tokens_of(fin_qwen) == expected
    jaxllm.register_model("FinQwenForCausalLM", **own, post_load=post_load)
    assert tokens_of(fin_qwen) == [0, 0, 0, 0]  # all logits are equal now
    assert seen == [32]


def test_a_last_fix_may_not_change_the_tree(fin_qwen: Path) -> None:
    def post_load(params: dict[str, Any], config: Any) -> dict[str, Any]:
        norm = params.pop("model.norm.weight")
        return params | {"extra": norm, "model.embed_tokens.weight": norm}

    jaxllm.register_model(
        "FinQwenForCausalLM",
        model="Qwen2ForCausalLM",
        rename={"query_proj": "q_proj"},
        post_load=post_load,
    )
    with pytest.raises(LoadError) as raised:
        LLM(str(fin_qwen), **OPTIONS)
    for part in ("model.norm.weight  lost", "extra  added", "post_load made it [32] float32"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "Qwen9ForCausalLM"}, "model='Qwen9ForCausalLM' is no supported architecture"),
        ({"model": "package.module:Class"}, "needs name_map= as well"),
        ({"model": "Qwen2ForCausalLM", "post_load": "f"}, "post_load='f' is not 'module:name'"),
        ({"model": "Qwen2ForCausalLM", "rename": {"": "x"}}, "rename has an empty name"),
    ],
)
def test_bad_registrations_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxllm.register_model("FinQwenForCausalLM", **arguments)
    assert registry.target_of("FinQwenForCausalLM") is None


def test_whole_parts_of_names_are_renamed_all_at_once() -> None:
    table = {"wq": "q_proj", "a.b": "c", "x": "y", "y": "x"}
    names = {"l.0.wq.weight": "l.0.q_proj.weight", "my_wq.w": "my_wq.w", "a.b.bias": "c.bias"}
    names |= {"a.bb": "a.bb", "x.y": "y.x"}
    assert {name: renamed(name, table) for name in names} == names


def test_two_tensors_of_one_name_are_refused(qwen: Path) -> None:
    with pytest.raises(
        LoadError, match=r"duplicated \(4\):\n.*layers.\{0..1\}.*q_proj.bias  is what"
    ):
        RenamedCheckpoint(open_checkpoint(str(qwen)), ({"k_proj": "q_proj"},))


def test_an_import_error_in_a_model_file_is_shown_as_such(
    fin_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_fin_model.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    jaxllm.register_model(
        "FinQwenForCausalLM", model="broken_fin_model:Fin", name_map="broken_fin_model:NAME_MAP"
    )
    with pytest.raises(ImportError, match=r"broken_fin_model:Fin, .*'no_such_dependency'"):
        LLM(str(fin_qwen), **OPTIONS)


SETUP = """
from setuptools import setup
setup(name="fin-qwen", version="1", py_modules=["fin_qwen"], entry_points={"jaxllm.models":
      ["fin = fin_qwen:register", "broken = fin_qwen:no_such_function"]})
"""
PLUGIN = """
import jaxllm
from jaxllm.models.qwen2 import Qwen2Config, Qwen2ForCausalLM


class FinQwenForCausalLM(Qwen2ForCausalLM):
    Config = Qwen2Config


def register():
    jaxllm.register_model("FinQwenForCausalLM", model="fin_qwen:FinQwenForCausalLM",
                          name_map="jaxllm.converters.qwen2:NAME_MAP",
                          rename={"query_proj": "q_proj"})
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip installed a package that registers a model class of its own."""
    source, target = tmp_path_factory.mktemp("plugin"), tmp_path_factory.mktemp("site")
    return pip_install(source, target, {"setup.py": SETUP, "fin_qwen.py": PLUGIN})


def test_an_installed_package_brings_its_model(
    fin_qwen: Path, plugin: Path, expected: list[int]
) -> None:
    script = (
        "from jaxllm import LLM, SamplingParams\n"
        f"llm = LLM({str(fin_qwen)!r}, **{OPTIONS!r})\n"
        f"params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)\n"
        f"print(llm.generate({PROMPT!r}, params, use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{plugin}", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(expected)
    assert "plug-in broken = fin_qwen:no_such_function of fin-qwen failed" in done.stderr


def test_values_come_through_a_rename(qwen: Path, fin_qwen: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint = RenamedCheckpoint(open_checkpoint(str(fin_qwen)), ({"query_proj": "q_proj"},))
    np.testing.assert_array_equal(checkpoint.read(name), open_checkpoint(str(qwen)).read(name))
    part = (slice(0, 3), slice(2, 5))
    np.testing.assert_array_equal(checkpoint.read(name, part), checkpoint.read(name)[part])
