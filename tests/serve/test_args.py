"""The command line: every config field a flag, old flags ignored aloud, typos explained."""

import dataclasses

import pytest

from jaxllm.config import EngineConfig
from jaxllm.serve.args import human_int, parse_args
from jaxllm.serve.options import ServeConfig


def test_defaults_are_the_configs_own():
    command = parse_args([])
    assert command.engine == EngineConfig()
    assert command.serve == ServeConfig()
    assert command.warnings == []


def test_every_field_of_every_kind():
    flags = (
        "MODEL --served-model-name a b --max_model_len 8k --max-num-batched-tokens=4K "
        "--no-enable-prefix-caching --enforce-eager --dtype bfloat16 --gpu-memory-utilization 0.5 "
        "--api-key x --api-key y --host 1.2.3.4 --port 9 --shutdown-timeout 2.5"
    )
    command = parse_args(flags.split())
    assert command.engine == EngineConfig(
        model="MODEL",
        served_model_name=("a", "b"),
        max_model_len=8000,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype="bfloat16",
        gpu_memory_utilization=0.5,
    )
    assert command.serve == ServeConfig(
        api_key=("x", "y"), host="1.2.3.4", port=9, shutdown_timeout=2.5
    )


@pytest.mark.parametrize("argv", [["--model", "M"], ["M"], ["M", "--model", "M"]])
def test_the_model_is_positional_or_a_flag(argv):
    assert parse_args(argv).engine.model == "M"


def test_no_field_is_without_a_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for config in (EngineConfig, ServeConfig):
        for field in dataclasses.fields(config):
            assert "--" + field.name.replace("_", "-") in shown


def test_flags_of_old_scripts_are_ignored_aloud():
    command = parse_args(["M", "--swap-space", "4", "--disable-log-requests"])
    assert command.engine == EngineConfig(model="M")
    assert [w.split()[0] for w in command.warnings] == ["--swap-space", "--disable-log-requests"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--max-num-seq 3", "--max-num-seqs"),
        ("--max_modellen 3", "--max-model-len"),
        ("--nothing-like-it", "unknown flag --nothing-like-it"),
        ("A B", "'B'"),
        ("A --model B", "twice"),
        ("--max-model-len 8q", "'8q'"),
        ("--max-model-len 1.0001k", "whole number"),
        ("--max-model-len -1", "--max-model-len must be at least 1"),
        ("--dtype int3", "bfloat16"),
        ("--port 99999", "--port must be between 0 and 65535"),
        ("--block-size 12", "--block-size"),
        ("--trust-remote-code", "--trust-remote-code"),
    ],
)
def test_wrong_flags_are_explained(argv, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(argv.split())
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) <= 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("8192", 8192),
        ("8k", 8000),
        ("8K", 8192),
        ("25.6k", 25600),
        ("2M", 2**21),
        ("-3", -3),
    ],
)
def test_human_numbers(text, value):
    assert human_int(text) == value
