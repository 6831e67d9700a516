"""A second start finds its programs compiled: none is traced, none is stale."""

import json
import math
import os
import pickle
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.engine import startup
from jaxllm.engine.local_engine import LocalEngine
from jaxllm.models import registry
from jaxllm.models.qwen2 import Qwen2ForCausalLM
from jaxllm.runner import kv_cache, program_context
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.mesh import make_mesh
from jaxllm.runner.program_cache import KEPT_SECONDS, Program, ProgramCache
from jaxllm.runner.programs import StepPrograms
from jaxllm.runner.sampler import SamplingMode
from jaxllm.runner.step import allocate
from tests.runner.parallel_models import BLOCKS, generate, make_config, quickly_compiled, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model") / "qwen2", "qwen2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """JAX's compilation cache is one a process: this module's own, gone when it ends."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    with quickly_compiled(), pytest.MonkeyPatch.context() as patch:
        # Somebody may edit the source while the tests run.
        patch.setattr(program_context, "_IMPORTED", math.inf)
        yield tmp_path_factory.mktemp("compilation")
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def start(folder: Path, cache: Path, **changes: Any) -> LocalEngine:
    options = {"enforce_eager": False, "compilation_cache_dir": str(cache)} | changes
    tp = options.pop("tensor_parallel_size", 1)
    return LocalEngine(make_config(folder, tp, options.pop("pipeline_parallel_size", 1), **options))


def counts(engine: LocalEngine) -> tuple[int, int]:
    programs = engine.engine.runner.programs
    return programs.num_loaded, programs.num_compiled


def contexts(cache: Path) -> set[Path]:
    return set((cache / "programs").iterdir()) if (cache / "programs").exists() else set()


@pytest.fixture(scope="module")
def first(folder: Path, cache: Path) -> Any:
    """What a start without any program gives, and how many it compiles."""
    engine = start(folder, cache)
    loaded, compiled = counts(engine)
    assert loaded == 0
    return [output.outputs[0].token_ids for output in generate(engine)], compiled


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a warm start lowers nothing")


@pytest.fixture
def no_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_lower", "_lower_sampler", "_lower_logprobs"):
        monkeypatch.setattr(StepPrograms, name, refuse)


@pytest.mark.usefixtures("no_lowering")
def test_a_second_start_lowers_nothing_and_gives_the_same_tokens(
    folder: Path, cache: Path, first: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens, compiled = first
    with caplog.at_level("INFO"):
        engine = start(folder, cache)
    assert counts(engine) == (compiled, 0)
    assert f"loaded {compiled}/{compiled} from the cache" in caplog.text
    assert f"{compiled} programs: {compiled} from the cache in" in caplog.text
    assert [output.outputs[0].token_ids for output in generate(engine)] == tokens


@pytest.mark.parametrize("damage", ["truncated", "no archive", "no program"])
def test_a_damaged_file_is_compiled_again(
    folder: Path, cache: Path, first: Any, damage: str
) -> None:
    [context] = contexts(cache)
    [path] = context.glob("sampler-1-*")
    whole = path.read_bytes()
    damaged = {
        "truncated": whole[: len(whole) // 2],
        "no archive": b"x" * 99,
        "no program": zlib.compress(pickle.dumps((b"", None, None, 0, 0))),
    }
    path.write_bytes(damaged[damage])
    # XLA has to compile it as well: what JAX's cache gives is not stored again.
    for entry in cache.glob("jit_*"):
        entry.unlink()
    engine = start(folder, cache)
    assert counts(engine) == (first[1] - 1, 1)
    assert path.stat().st_size > len(whole) // 2
    assert counts(start(folder, cache)) == (first[1], 0)


def test_what_jax_has_compiled_before_is_not_stored_again(
    folder: Path, cache: Path, first: Any
) -> None:
    """XLA's CPU code, stored a second time, loads and then fails when it runs."""
    [context] = contexts(cache)
    [path] = context.glob("sampler-1-*")
    whole = path.read_bytes()
    path.unlink()
    # The first of them fills JAX's cache, if a test before has emptied it.
    for entry in cache.glob("jit_*"):
        entry.unlink()
    start(folder, cache)
    path.unlink()
    assert counts(start(folder, cache)) == (first[1] - 1, 1)
    assert not path.exists()
    path.write_bytes(whole)


@pytest.mark.parametrize("changed", ["config", "model config", "source", "setting", "variable"])
def test_whatever_changes_a_program_makes_another_context(
    folder: Path,
    cache: Path,
    first: Any,
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    found: list[str] = []
    monkeypatch.setattr(ProgramCache, "load", lambda self, *_: found.append(self._folder.name))
    monkeypatch.setattr(ProgramCache, "compile", refuse)
    options: dict[str, Any] = {}
    if changed == "config":
        options["max_model_len"] = 88
    elif changed == "model config":
        settings = json.loads((folder / "config.json").read_text()) | {"rope_theta": 5e5}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        folder = tmp_path
    elif changed == "source":
        monkeypatch.setattr(program_context, "source_hash", lambda _: "another")
    elif changed == "setting":
        before = jax.config.jax_default_matmul_precision
        request.addfinalizer(lambda: jax.config.update("jax_default_matmul_precision", before))
        jax.config.update("jax_default_matmul_precision", "highest")
    else:
        monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_dump_hlo_as_text")
    with pytest.raises(AssertionError, match="lowers nothing"):
        start(folder, cache, **options)
    assert found
    assert found[0] not in {path.name for path in contexts(cache)}


@pytest.mark.parametrize(
    "options", [{"compilation_cache_dir": ""}, {"enforce_eager": True}], ids=str
)
def test_without_a_cache_or_eagerly_nothing_is_kept(
    folder: Path, cache: Path, options: dict[str, Any]
) -> None:
    before = contexts(cache)
    engine = start(folder, cache, **options)
    generate(engine)
    assert counts(engine)[0] == 0
    assert contexts(cache) == before


def test_a_users_own_class_is_not_cached(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OwnForCausalLM(Qwen2ForCausalLM):
        pass

    before = contexts(cache)
    monkeypatch.setitem(registry._TARGETS, "Qwen2ForCausalLM", OwnForCausalLM)
    engine = start(folder, cache)
    assert counts(engine)[0] == 0
    assert contexts(cache) == before


def test_shared_and_staged_programs_are_cached_too(folder: Path, cache: Path) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    engine = start(folder, cache, **sizes)
    assert counts(engine)[0] == 0
    again = start(folder, cache, **sizes)
    assert counts(again) == counts(engine)[::-1]
    tokens = [output.outputs[0].token_ids for output in generate(engine)]
    assert [output.outputs[0].token_ids for output in generate(again)] == tokens


def test_another_number_of_blocks_shares_what_does_not_depend_on_it(
    folder: Path, cache: Path, first: Any
) -> None:
    before = contexts(cache)
    programs = start(folder, cache, num_gpu_blocks_override=BLOCKS + 3).engine.runner.programs
    # Two samplers, a prompt logprobs program; and a step of each bucket.
    assert (programs.num_loaded, programs.num_compiled) == (3, 3)
    assert contexts(cache) == before


def test_the_memory_is_planned_with_a_cached_program(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the largest step is asked before the number of blocks is known."""
    monkeypatch.setattr(kv_cache, "device_memory", lambda _: 10**9)
    plans: list[Any] = []
    monkeypatch.setattr(startup, "_log_memory", lambda _, memory, __: plans.append(memory))
    start(folder, cache)
    monkeypatch.setattr(ProgramCache, "compile", refuse)
    start(folder, cache)
    assert plans[0] == plans[1]
    assert plans[0][0].holders.activations > 0


@pytest.mark.usefixtures("no_lowering")
def test_a_loaded_step_updates_the_cache_in_place(folder: Path, cache: Path, first: Any) -> None:
    runner: Any = start(folder, cache).engine.runner
    bucket = Bucket(2, 2, True)
    step = runner.programs.step(bucket, SamplingMode.GREEDY, 0)
    state = allocate(runner._shapes)
    before = jax.tree.leaves(state.kv_cache)
    places = [array.unsafe_buffer_pointer() for array in before]
    packed = runner.programs.upload(np.zeros(runner.programs.layout(bucket).size, np.int32))
    after = step(runner.params, state, packed)[0]
    assert all(array.is_deleted() for array in before)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(after.kv_cache)] == places


def test_a_programs_sizes_come_from_its_file(folder: Path, cache: Path, first: Any) -> None:
    """The memory is planned by them, and XLA may not tell them of a loaded program."""
    programs = start(folder, cache).engine.runner.programs
    assert programs.num_compiled == 0
    fresh = start(folder, cache, compilation_cache_dir="").engine.runner.programs
    assert fresh.num_loaded == 0
    assert programs.activation_bytes(0, 3) == fresh.activation_bytes(0, 3) > 0


@pytest.fixture
def program(cache: Path) -> Any:
    """(lowered, its devices): on the second and third, to see that they are found again."""
    mesh = make_mesh(jax.devices()[1:3], tensor_parallel_size=2)
    sharding = NamedSharding(mesh, PartitionSpec("tp"))
    shape = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: x + time.time()).trace(shape).lower(), list(mesh.devices.flat)


def test_forgotten_contexts_are_removed(program: Any, tmp_path: Path) -> None:
    lowered, devices = program
    old, used = tmp_path / "old", tmp_path / "used"
    for path in (old, used):
        path.mkdir()
        (path / "file").write_bytes(b"")
    past = time.time() - KEPT_SECONDS - 60
    os.utime(old, (past, past))
    store = ProgramCache(tmp_path, "new", gpu=True)
    store.compile("a", lowered, None)
    assert {path.name for path in tmp_path.iterdir()} == {"used", "new"}
    os.utime(tmp_path / "new", (past, past))
    loaded = store.load("a", devices)
    assert isinstance(loaded, Program)
    assert (tmp_path / "new").stat().st_mtime > past + 60
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a"]
    argument = jax.device_put(np.zeros(4, np.float32), loaded.compiled.input_shardings[0][0])
    assert loaded.compiled(argument).devices() == set(devices)


def test_a_folder_that_cannot_be_written_costs_nothing(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = ProgramCache(tmp_path / "file", "context", gpu=True)
    assert store.compile("a", program[0], None).compiled is not None
    assert store.load("a", program[1]) is None
