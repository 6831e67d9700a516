"""Converted folders are loaded by transformers itself and give the same logits."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from jaxllm.convert import convert, main
from jaxllm.converters.checkpoint import open_checkpoint
from jaxllm.converters.errors import CheckpointError
from tests.converters.tiny_models import ARCHITECTURES, SIZES, save_model

TOKENS = torch.tensor([[1, 5, 9, 2, 80, 33]])


def save_tokenizer(folder: Path) -> None:
    words = {f"w{i}": i for i in range(SIZES["vocab_size"])}
    backend = Tokenizer(WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)


def logits_of(folder: Path) -> torch.Tensor:
    model: Any
    info: Any
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )  # pyright: ignore[reportGeneralTypeIssues]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = save_model(tmp_path / "source", "Qwen2", tie_word_embeddings=True)
    save_tokenizer(folder)
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_round_trip_keeps_the_logits(tmp_path: Path, architecture: str, tied: bool) -> None:
    source = save_model(
        tmp_path / "source", architecture, tie_word_embeddings=tied, max_shard_size="20KB"
    )
    save_tokenizer(source)
    target = convert(str(source), tmp_path / "target", progress=False)
    assert {file.name for file in target.glob("*.safetensors*")} == {"model.safetensors"}
    torch.testing.assert_close(logits_of(target), logits_of(source), rtol=0, atol=0)
    old, new = (
        transformers.PreTrainedTokenizerFast.from_pretrained(path) for path in (source, target)
    )
    assert old.encode("w3 w7") == new.encode("w3 w7") == [3, 7]
    assert new.chat_template == old.chat_template
    assert open_checkpoint(str(target)).generation_config
    assert target.stat().st_mode & 0o077 == source.stat().st_mode & 0o077


def test_large_models_are_sharded(tmp_path: Path, source: Path) -> None:
    target = convert(str(source), tmp_path / "target", shard_bytes=20_000, progress=False)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in target.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(
        info.nbytes for info in open_checkpoint(str(source)).tensors.values()
    )
    assert all((target / file).stat().st_size < 22_000 for file in files)
    torch.testing.assert_close(logits_of(target), logits_of(source), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_casts_the_floats(tmp_path: Path, source: Path, dtype: str) -> None:
    target = convert(str(source), tmp_path / "target", dtype=dtype, progress=False)
    old, new = (open_checkpoint(str(path)) for path in (source, target))
    assert new.config["dtype"] == dtype
    for name in old.tensors:
        wanted = old.read(name).astype(np.dtype(dtype))
        assert new.read(name).dtype == wanted.dtype
        np.testing.assert_array_equal(new.read(name), wanted)


def test_auto_keeps_every_dtype(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    for name in tensors:
        if "mlp" in name:
            tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    safetensors.numpy.save_file(tensors, file)
    target = convert(str(source), tmp_path / "target", progress=False)
    written = safetensors.numpy.load_file(target / "model.safetensors")
    assert set(written) == set(tensors)
    for name, tensor in tensors.items():
        assert written[name].dtype == tensor.dtype
        np.testing.assert_array_equal(written[name], tensor)


def test_a_differing_head_of_a_tied_model_is_kept(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    safetensors.numpy.save_file(tensors, file)
    target = convert(str(source), tmp_path / "target", progress=False)
    assert open_checkpoint(str(target)).config["tie_word_embeddings"] is False
    plain = save_model(tmp_path / "plain", "Qwen2", tie_word_embeddings=True)
    torch.testing.assert_close(logits_of(target), logits_of(plain) * 2)


def test_copies_and_buffers_are_left_out(tmp_path: Path, source: Path) -> None:
    file = source / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    wanted = set(tensors)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(tensors, file)
    target = convert(str(source), tmp_path / "target", progress=False)
    assert set(open_checkpoint(str(target)).tensors) == wanted


def test_code_is_not_pointed_to(tmp_path: Path, source: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}
    (source / "config.json").write_text(json.dumps(config))
    target = convert(str(source), tmp_path / "target", progress=False)
    assert "auto_map" not in json.loads((target / "config.json").read_text())


# The target


def test_a_taken_target_is_refused_and_untouched(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not empty: delete it or give another folder"):
        convert(str(source), target)
    assert [file.name for file in target.iterdir()] == ["precious"]
    with pytest.raises(CheckpointError, match="is a file"):
        convert(str(source), target / "precious")
    with pytest.raises(CheckpointError, match="not empty"):
        convert(str(source), source)


def test_an_empty_target_and_absent_parents_will_do(tmp_path: Path, source: Path) -> None:
    (tmp_path / "empty").mkdir()
    convert(str(source), tmp_path / "empty", progress=False)
    convert(str(source), tmp_path / "a" / "b", progress=False)
    for target in ("empty", "a/b"):
        assert (tmp_path / target / "model.safetensors").is_file()


def test_a_failure_leaves_nothing(tmp_path: Path, source: Path, monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxllm.convert.write_safetensors", fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*target: No space left on device"):
        convert(str(source), tmp_path / "target")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_too_little_space_is_seen_before_writing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"0.0 GB free, the weights need 0.0 GB"):
        convert(str(source), tmp_path / "target")
    assert not (tmp_path / "target").exists()


# The command


def test_the_command(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    assert main([str(source), str(target), "--dtype", "bfloat16"]) == 0
    assert f"wrote {target}" in capsys.readouterr().out
    assert main([str(source), str(target)]) == 1
    assert capsys.readouterr().err.startswith(f"error: {target} is not empty")
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "other")]) == 1
    assert "there is no such file or folder" in capsys.readouterr().err


def test_quiet_says_nothing(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(source), str(tmp_path / "target"), "-q"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
    assert main([str(source), str(tmp_path / "target"), "--quiet"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_an_interruption_leaves_nothing(
    tmp_path: Path, source: Path, signum: signal.Signals, to: str
) -> None:
    """Interrupted when the weights are written and their sums are not."""
    code = (
        "import runpy, sys, time\n"
        "from jaxllm.converters import checksums\n"
        "checksums.write_sums = lambda folder: (print('writing', flush=True), time.sleep(60))\n"
        "sys.argv = ['convert', *sys.argv[1:]]\n"
        "runpy.run_module('jaxllm.convert', run_name='__main__')\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "target"), "--to", to]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        assert len(list(tmp_path.glob(".target.*/config.json"))) == 1
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == f"interrupted: {tmp_path / 'target'} was not written"
    assert "Traceback" not in err
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_the_command_imports_no_jax(tmp_path: Path, source: Path) -> None:
    code = (
        "import sys; from jaxllm.convert import main; "
        "code = main(sys.argv[1:]); assert not {'jax', 'torch'} & set(sys.modules); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "target")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_demo_becomes_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    target = convert("demo", tmp_path / "demo", progress=False)
    config = json.loads((target / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
