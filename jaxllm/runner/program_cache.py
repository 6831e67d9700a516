"""Compiled programs on disk, so that a warm start neither traces nor lowers.

JAX's compilation cache spares XLA's work only: its key is the lowered program, and tracing and
lowering, all under Python's lock, take longer than reading what it has. Here the key is what the
programs are made from (`program_context`). A file is a pickle, to be trusted as far as the folder
is, like those of JAX's cache.
"""

import functools
import logging
import os
import pickle
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

logger = logging.getLogger(__name__)

KEPT_SECONDS = 30 * 24 * 3600
"""Programs of a context that was not used for as long are removed."""
_JAX_CACHE_WROTE = "/jax/compilation_cache/cache_misses"

_compiling = threading.local()


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program and what it takes of each device, in bytes.

    Attributes:
        scratch: while it runs.
        results: that it leaves, beside the arrays it updates in place.
    """

    compiled: Any
    scratch: int = 0
    results: int = 0


def compile_program(lowered: Any, options: Any) -> Program:
    """Compiles, and asks for the sizes."""
    compiled = lowered.compile(compiler_options=options)
    memory = compiled.memory_analysis()
    if memory is None:
        return Program(compiled)
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Program(compiled, memory.temp_size_in_bytes, fresh)


class ProgramCache:
    """The programs of one context: a file each, in a folder of their own.

    Methods may be called from several threads.

    Args:
        folder: of the programs of all contexts.
        context: of these (see `program_context`).
        gpu: whether they run on GPUs.
    """

    def __init__(self, folder: Path, context: str, *, gpu: bool) -> None:
        self._folder = folder / context
        _listen()
        if gpu:
            _register_kernels()

    def load(self, name: str, devices: Sequence[Any]) -> Program | None:
        """The program as it was stored, for the same devices; None if there is none that works.

        What cannot be read is removed, so that `compile` may replace it.
        """
        path = self._path(name)
        try:
            data = path.read_bytes()
            os.utime(self._folder)
        except OSError:
            return None
        try:
            executable, in_tree, out_tree, *sizes = pickle.loads(zlib.decompress(data))
            compiled = deserialize_and_load(
                executable,
                in_tree,
                out_tree,
                backend=devices[0].client,
                execution_devices=devices,
            )
            return Program(compiled, *sizes)
        except Exception as error:
            # Pickle, zlib and XLA raise what they like; compiling always works.
            logger.debug("%s cannot be loaded, so it is compiled: %r", path, error)
            path.unlink(missing_ok=True)
            return None

    def compile(self, name: str, lowered: Any, options: Any) -> Program:
        """Compiles a program, and stores it under `name` if XLA had to be asked."""
        _compiling.anew = False
        program = compile_program(lowered, options)
        # What came from JAX's cache does not survive being stored a second time: XLA's CPU code
        # would load, and fail when it runs, and its GPU code has no promise either. So it must
        # have been compiled just now, which JAX tells by writing it.
        if _compiling.anew:
            self._store(name, program)
        return program

    def _store(self, name: str, program: Program) -> None:
        """Writes a file that is whole or not there; that it fails only costs the next start."""
        try:
            parts = *serialize(program.compiled), program.scratch, program.results
            data = zlib.compress(pickle.dumps(parts), 1)
            self._create_folder()
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
            try:
                with open(handle, "wb") as file:
                    file.write(data)
                os.replace(temporary, self._path(name))
            except BaseException:
                os.unlink(temporary)
                raise
        except Exception as error:
            logger.debug("program %s is not cached: %r", name, error)

    def _create_folder(self) -> None:
        """Where it is the context's first program, those of forgotten contexts go."""
        if self._folder.is_dir():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.parent.iterdir():
            if other != self._folder and time.time() - other.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / name


@functools.cache
def _listen() -> None:
    jax.monitoring.register_event_listener(_note_event)


def _note_event(event: str, **_: Any) -> None:
    """JAX calls it in the thread that compiles."""
    if event == _JAX_CACHE_WROTE:
        _compiling.anew = True


@functools.cache
def _register_kernels() -> None:
    """What lowering does beside: the modules of the kernel languages tell XLA how to run kernels,
    and where their run-time library is."""
    try:
        import jax.experimental.pallas.mosaic_gpu
        import jax.experimental.pallas.triton  # noqa: F401
    except ImportError as error:
        # Then no program has such kernels (see pallas_kernels/paged_attention/api.py).
        logger.debug("a kernel language is missing: %r", error)
