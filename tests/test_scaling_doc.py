"""The figures of docs/scaling.md are those of jaxllm.plan and of the formulas beside them."""

import functools
import math
import tempfile
from pathlib import Path

import pytest

from jaxllm.config import EngineConfig
from jaxllm.engine.fit import Request, make_request
from jaxllm.runner.estimate import Parallel
from jaxllm.runner.kv_cache import GIB

ROOT = Path(__file__).resolve().parents[1]
MEMORY, CONTEXT, WIDTH = 141 * 10**9, 8192, 2
READ, PRODUCTS = 4.19e12, 775e12
LINKS = {"NVLink": (10e-6, 450e9), "InfiniBand": (30e-6, 50e9), "Ethernet": (50e-6, 12.5e9)}


def rows(name: str) -> list[dict[str, str]]:
    """The table that follows the comment of that name, a dict a row."""
    text = (ROOT / "docs" / "scaling.md").read_text().split(f"<!-- {name} -->\n")[1]
    lines = text.split("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


@functools.cache
def request_for(name: str, tp: int, pp: int) -> Request:
    with tempfile.TemporaryDirectory() as folder:
        shape = ROOT / "scripts" / "shapes" / f"{name}.json"
        Path(folder, "config.json").write_bytes(shape.read_bytes())
        config = EngineConfig(model=folder, max_model_len=CONTEXT, tensor_parallel_size=tp)
        return make_request(config, MEMORY, Parallel(tp, pp))


def request_of(row: dict[str, str]) -> Request:
    return request_for(row["model"], int(row["tp"]), int(row.get("pp", 1)))


def requests_held(request: Request) -> int:
    plan, shape, _ = request.plan()
    return max(0, plan.budget // (shape.bytes_per_token * CONTEXT))


def ids(row: dict[str, str]) -> str:
    return "-".join(list(row.values())[:4])


@pytest.mark.parametrize("row", rows("plan"), ids=ids)
def test_weights_and_cache_are_the_plans(row):
    request = request_of(row)
    plan, shape, _ = request.plan()
    assert row["weights, GiB"] == f"{plan.holders.weights / GIB:.2f}"
    assert int(row["cache, bytes a token"]) == shape.bytes_per_token
    assert int(row["requests"]) == requests_held(request)
    assert bool(request.problem()) == (requests_held(request) == 0)


@pytest.mark.parametrize("row", rows("traffic"), ids=ids)
def test_traffic_is_what_the_formula_gives(row):
    request, tp, tokens = request_of(row), int(row["tp"]), int(row["tokens"])
    layers, hidden = request.model.num_hidden_layers, request.model.hidden_size
    assert float(row["summed a token, KiB"]) == 2 * layers * hidden * WIDTH / 1024
    for link, (latency, speed) in LINKS.items():
        moved = 2 * (tp - 1) / tp * tokens * hidden * WIDTH
        seconds = 2 * layers * (latency + moved / speed)
        assert row[f"{link}, ms"] == f"{seconds * 1e3:.1f}"
    weights = request.plan()[0].holders.weights
    assert row["weights read, ms"] == f"{weights / READ * 1e3:.1f}"
    used = [leaf for name, leaf in request.shapes.items() if "embed_tokens" not in name]
    parameters = sum(math.prod(leaf.shape) for leaf in used)
    assert row["products, ms"] == f"{2 * parameters * tokens / tp / PRODUCTS * 1e3:.1f}"


@pytest.mark.parametrize("row", rows("fleet"), ids=ids)
def test_a_fleet_is_as_many_replicas_as_fit(row):
    replicas = int(row["GPUs"]) // (int(row["tp"]) * int(row["pp"]))
    assert int(row["replicas"]) == replicas
    assert int(row["requests of 8192 tokens held"]) == replicas * requests_held(request_of(row))


def test_the_figures_in_the_text():
    text = (ROOT / "docs" / "scaling.md").read_text()
    assert len(text.splitlines()) <= 150
    four, two = (requests_held(request_for("llama-3.1-70b", tp, 1)) for tp in (4, 2))
    assert f"hold {four} requests, as two engines of two {2 * two}." in text
    hidden = request_for("llama-3.1-70b", 4, 1).model.hidden_size
    assert 64 * hidden * WIDTH == 2**20
    assert "1 MiB a border and step: 0.02 ms over InfiniBand, 0.08 ms over Ethernet" in text
    for link, shown in (("InfiniBand", "0.02"), ("Ethernet", "0.08")):
        assert f"{2**20 / LINKS[link][1] * 1e3:.2f}" == shown
