"""scripts/bench_parallel.py: its arithmetic, and that a part that fails costs only itself."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxllm
from tests.runner.parallel_models import quickly_compiled

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    """bench_parallel and parallel_figures, which import their neighbours by plain names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        names = ("bench_parallel", "parallel_figures")
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def figures(scripts: Any, tmp_path: Path) -> Any:
    return scripts.parallel_figures.Figures(tmp_path / "figures.json", tmp_path / "record.json")


def test_efficiency_is_the_speed_up_over_the_devices(scripts: Any) -> None:
    compare = scripts.parallel_figures.compare
    assert compare(2.5, 4.0, "ms", 2) == {"ratio_to_tp1": 0.625, "efficiency": 0.8}
    assert compare(18.0, 10.0, "output tok/s", 2) == {"ratio_to_tp1": 1.8, "efficiency": 0.9}


@pytest.mark.parametrize(
    ("sizes", "name", "unit", "ratio", "expected"),
    [
        ({"tp": 2}, "TPOT, batch 1", "ms", 0.62, "target 0.62: met"),
        ({"tp": 2}, "TPOT, batch 1", "ms", 0.63, "target 0.62: MISSED"),
        ({"pp": 2}, "256 requests U(100,1024)", "output tok/s", 1.8, "target 1.7: met"),
        ({"pp": 2}, "256 requests U(100,1024)", "output tok/s", 1.6, "target 1.7: MISSED"),
        ({"pp": 2}, "TPOT, batch 1", "ms", 1.0, ""),
        ({"tp": 4}, "TPOT, batch 1", "ms", 0.3, ""),
    ],
)
def test_targets_are_most_for_times_and_least_for_rates(
    scripts: Any, sizes: dict[str, int], name: str, unit: str, ratio: float, expected: str
) -> None:
    layout = scripts.parallel_figures.Layout(**sizes)
    assert scripts.parallel_figures.verdict(layout, name, unit, ratio) == expected


def test_a_figure_is_kept_printed_and_recorded_beside_one_devices(
    scripts: Any, figures: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = scripts.parallel_figures.Layout
    figures.add("m", "TPOT, batch 1", layout(), 4.0, "ms", floor_ms=3.5)
    figures.add("m", "TPOT, batch 1", layout(tp=2), 2.4, "ms", floor_ms=1.75)
    figures.add("m", "TPOT, batch 1: all-reduces", layout(tp=2), 12.5, "%")
    assert figures.find("m", "TPOT, batch 1", layout(tp=2)) == 2.4
    assert figures.find("m", "TPOT, batch 1", layout(pp=2)) is None
    shown = capsys.readouterr().out
    assert "floor_ms 1.75, 0.600 x tp=1 (4.000), efficiency 0.83, target 0.62: met" in shown
    one, two, share = json.loads((tmp_path / "record.json").read_text())
    assert (one["tp"], one["floor_ms"], "ratio_to_tp1" in one) == (1, 3.5, False)
    assert (two["tp"], two["pp"], two["dtype"]) == (2, 1, "bfloat16")
    assert (two["ratio_to_tp1"], two["efficiency"]) == (0.6, 0.8333)
    assert (share["figure"], share["unit"], "ratio_to_tp1" in share) == (12.5, "%", False)


def test_the_floor_of_70b_on_two_devices(scripts: Any) -> None:
    script = scripts.bench_parallel
    layout = scripts.parallel_figures.Layout(tp=2)
    weights = int(65.71 * 2**30)  # docs/scaling.md
    assert script.floor_ms(weights, layout, script.shape_of("Llama-3.1-70B")) == pytest.approx(
        16.6, abs=0.05
    )


def test_the_sums_of_a_step_are_two_a_layer(scripts: Any, figures: Any) -> None:
    layout = scripts.parallel_figures.Layout(tp=2)
    part = scripts.bench_parallel.EnginePart("llama-3.1-8b", layout, (), 1, 1)
    part._add_share(figures, "decode step, batch 64", 4.0)  # how long a sum takes is not known
    assert figures.find("llama-3.1-8b", "decode step, batch 64: all-reduces", layout) is None
    figures.add("llama-3.1-8b", "one all-reduce, 64 rows", layout, 10.0, "us")
    part._add_share(figures, "decode step, batch 64", 4.0)
    share = figures.find("llama-3.1-8b", "decode step, batch 64: all-reduces", layout)
    assert share == pytest.approx(100 * 2 * 32 * 0.010 / 4.0)


def test_sums_are_timed_for_every_decode_step(scripts: Any, figures: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    model = ["--model-8b", str(tmp_path), "--model-70b", str(tmp_path), "--repeats", "1"]
    assert scripts.bench_parallel.measure_sums(
        scripts.bench_parallel.make_parser().parse_args(model), figures
    )
    layout = scripts.parallel_figures.Layout(tp=2)
    for rows in (2, 64, 256):
        name = f"one all-reduce, {rows} rows"
        assert figures.find(tmp_path.name.lower(), name, layout) is not None


def test_tokens_are_those_of_one_device(scripts: Any, figures: Any) -> None:
    args = scripts.bench_parallel.make_parser().parse_args(
        ["--engine-args", '{"compilation_cache_dir": ""}']
    )
    with quickly_compiled():
        assert scripts.bench_parallel.check_tokens(args, figures)
    for sizes in ({}, {"tp": 2}, {"pp": 2}):
        layout = scripts.parallel_figures.Layout(**sizes)
        assert figures.find("tiny", "greedy tokens as tp=1", layout) == 8


def test_other_tokens_are_noticed(
    scripts: Any, figures: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WrongOnTwo:
        def __init__(self, model: str, **options: Any) -> None:
            self.token = options["tensor_parallel_size"]

        def generate(self, prompts: list[list[int]], *_: Any, **__: Any) -> list[Any]:
            tokens = [[0] for _ in prompts[1:]] + [[self.token]]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in tokens]

    monkeypatch.setattr(jaxllm, "LLM", WrongOnTwo)
    assert not scripts.bench_parallel.check_tokens(
        scripts.bench_parallel.make_parser().parse_args([]), figures
    )
    layout = scripts.parallel_figures.Layout
    assert figures.find("tiny", "greedy tokens as tp=1", layout(tp=2)) == 7
    assert figures.find("tiny", "greedy tokens as tp=1", layout(pp=2)) == 8


def test_a_part_that_fails_or_hangs_leaves_the_others(
    scripts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script, file = scripts.bench_parallel, tmp_path / "figures.json"
    assert not script.run_apart(["--model-8b", "nowhere"], "allreduce", file, 60)
    assert not script.run_apart([], "8b-tp1", file, 0.1)
    shown = capfd.readouterr().out
    assert "FAILED allreduce: FileNotFoundError" in shown
    assert "FAILED allreduce: exit code 1" in shown
    assert "FAILED 8b-tp1: stopped after 0 s" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--parts", "tokens,8b-tp4"], "no part '8b-tp4': take of tokens,allreduce,8b-tp1,8b-tp2,"),
        (["--quick", "--record"], "--quick gives no figures to record"),
    ],
)
def test_what_cannot_be_run_is_refused(
    scripts: Any, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        scripts.bench_parallel.main(flags)
    assert message in capsys.readouterr().err


def test_every_part_has_a_limit_and_follows_the_number_of_devices(scripts: Any) -> None:
    script = scripts.bench_parallel
    parts = script.make_parts(script.make_parser().parse_args(["--devices", "4"]))
    assert list(parts) == ["tokens", "allreduce", "8b-tp1", "8b-tp4", "8b-pp4", "70b"]
    assert all(any(name.startswith(start) for start in script.SECONDS) for name in parts)
    assert parts["8b-pp4"].layout.options == {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 4,
    }
