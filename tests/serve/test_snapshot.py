"""Every setting with its origin: written, read back, shown."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm import generate
from jaxllm.config import EngineConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.serve.app import make_app
from jaxllm.serve.args import Command, parse_args
from jaxllm.serve.metrics import Metrics
from jaxllm.serve.options import ServeConfig
from jaxllm.serve.snapshot import as_yaml, effective_settings
from jaxllm.serve.state import ServerState
from tests.engine.scripted_engine import ScriptedEngine
from tests.serve.server_process import COMMON_FLAGS, ServerProcess

FLAGS = (
    "M --served-model-name a b --max-model-len 8k --no-enable-prefix-caching --dtype half "
    "--gpu-memory-utilization 0.5 --port 9"
)


def snapshot_of(command: Command) -> str:
    settings = effective_settings([command.engine, command.serve], command.origins)
    return as_yaml(settings, {"top_k": 7, "temperature": 0.6})


def write(folder: Path, text: str) -> str:
    (folder / "settings.yaml").write_text(text)
    return str(folder / "settings.yaml")


def test_a_snapshot_taken_back_gives_the_same_settings(tmp_path: Path) -> None:
    template = "{{ x }}\n'quoted' \"twice\" # no comment: ü"
    first = parse_args([*FLAGS.split(), "--chat-template", template])
    text = snapshot_of(first)
    again = parse_args(["--config", write(tmp_path, text)])
    assert (again.engine, again.serve) == (first.engine, first.serve)
    # The two differ in the origins alone: all that was written comes from the file now.
    strip = [line.rsplit("  # ", 1)[0] for line in text.splitlines()]
    assert [line.rsplit("  # ", 1)[0] for line in snapshot_of(again).splitlines()] == strip
    assert snapshot_of(parse_args(["--config", write(tmp_path, snapshot_of(again))])) == (
        snapshot_of(again)
    )


def test_lines_are_sorted_and_say_where_they_come_from(tmp_path: Path) -> None:
    path = write(tmp_path, "max_num_seqs: 8k\nmax-num-batched-tokens: 9000\nseed: null\n")
    text = snapshot_of(parse_args(["M", "--max-num-seqs", "4", "--config", path]))
    settings = [line for line in text.splitlines() if not line.startswith("#")]
    assert settings == sorted(settings)
    for line in (
        'model: "M"  # flag',
        "max-num-seqs: 4  # flag",
        "max-num-batched-tokens: 9000  # file",
        "max-model-len: null  # checkpoint",
        "seed: 0  # default",
    ):
        assert line in settings
    assert "# sampling default top_k: 7  # checkpoint" in text


def test_flags_win_over_the_file_as_a_whole(tmp_path: Path) -> None:
    lines = 'model: F\nserved-model-name: [x, y]\nenforce_eager: true\nmax-model-len: "8K"\n'
    path = write(tmp_path, lines)
    command = parse_args(["--config", path, "M", "--served-model-name", "a", "--no-enforce-eager"])
    assert command.engine == EngineConfig(
        model="M", served_model_name=("a",), enforce_eager=False, max_model_len=8192
    )


def test_secrets_are_not_written() -> None:
    command = parse_args(["M", "--api-key", "hunter2"])
    text = snapshot_of(command)
    assert "hunter2" not in text
    assert '# api-key: "(not shown)"  # flag' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", "unknown setting max-model-length; did you mean max-model-len"),
        ("port: 1\nport: 2", "port is set twice"),
        ("max-model-len: many", "'many' is not a whole number"),
        ("max-model-len: [1, 2]", "max-model-len takes one value, got [1, 2]"),
        ("enforce-eager: 1", "enforce-eager must be true or false, got 1"),
        ("dtype: int7", "invalid choice: 'int7'"),
        ("- a\n- b", "holds no 'name: value' lines"),
        ("a: [", "is no valid YAML"),
        ("block-size: 7", "--block-size must be a power of two"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--config", write(tmp_path, text)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--config", "no/such.yaml"])
    assert "--config no/such.yaml: No such file" in capsys.readouterr().err


def test_a_servers_file_serves_generate(tmp_path: Path) -> None:
    args = generate.make_parser().parse(["--config", write(tmp_path, "port: 1\nmax-num-seqs: 3")])
    assert generate.engine_config(args).max_num_seqs == 3
    assert args.origins["max_num_seqs"] == "file"


async def test_server_info_has_settings_origins_and_sampling_defaults() -> None:
    engine = AsyncEngine(EngineConfig(model="scripted"), make_engine=ScriptedEngine)
    try:
        serve_config = ServeConfig(api_key=("secret",))
        state = ServerState(
            engine, serve_config, Metrics("s"), ("s",), origins={"model": "flag", "api_key": "flag"}
        )
        transport = httpx.ASGITransport(make_app(state))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await engine.wait_ready()
            engine.open(None)
            state.take_defaults()
            assert (await http.get("/server_info")).status_code == 401
            answer = await http.get("/server_info", headers={"authorization": "Bearer secret"})
            info = answer.json()
            assert info["settings"]["model"] == {"value": "scripted", "origin": "flag"}
            assert info["settings"]["port"] == {"value": 8000, "origin": "default"}
            assert info["sampling_defaults"]["top_k"] == 7
            assert "secret" not in answer.text
    finally:
        await engine.close()


def test_a_server_writes_what_it_runs_with(tiny_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "effective.yaml"
    arguments = (str(tiny_model), *COMMON_FLAGS, "--dump-config", str(target))
    server = ServerProcess(tmp_path / "log", *arguments, wait=True)
    try:
        info: dict[str, Any] = httpx.get(f"{server.url}/server_info", timeout=10).json()
    finally:
        server.stop()
    lines = target.read_text().splitlines()
    settings = info["settings"]
    assert settings["dtype"]["value"] == "float32"
    for name, setting in settings.items():
        line = f"{name.replace('_', '-')}: {json.dumps(setting['value'])}  # {setting['origin']}"
        assert line in lines
