"""Programs loaded from the cache where they are there, else compiled and put into it."""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxllm.runner.compiler_options import Options
from jaxllm.runner.program_cache import Program, ProgramCache, compile_program


@dataclass(frozen=True, slots=True)
class Job:
    """A program to be loaded or compiled.

    Attributes:
        name: unlike that of any other job of the same engine.
        made_from: `tree_hash` of its arguments, as far as name and engine do not tell them.
        store: called with the compiled program.
        stage: whose devices run it.
    """

    name: str
    made_from: str
    store: Callable[[Any], None]
    lower: Callable[[], Any]
    num_tokens: int
    stage: int = 0


@dataclass(slots=True)
class _Peak:
    """The most bytes that any program of a stage takes while it runs, and leaves."""

    scratch: int = 0
    results: int = 0


class ProgramBuilder:
    """Builds programs, counts them and remembers what they take.

    Args:
        cache: where they are kept, if they are.
    """

    def __init__(self, cache: ProgramCache | None) -> None:
        self._cache = cache
        self._peaks: dict[int, _Peak] = {}
        self.num_compiled = 0
        self.num_loaded = 0

    def build_all(self, jobs: list[Job], threads: int, log: Callable[[str], None]) -> None:
        """Loads what is cached and compiles the rest.

        Tracing is serial; reading files and XLA run in `threads`.
        """
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            missing = self._load_all(jobs, pool)
            if len(missing) < len(jobs):
                took = time.perf_counter() - start
                log(f"loaded {len(jobs) - len(missing)}/{len(jobs)} from the cache ({took:.1f} s)")
            futures = [(job, pool.submit(self._compile, job, job.lower())) for job in missing]
            for done, (job, future) in enumerate(futures, 1):
                self._keep(job, future.result())
                if done % 8 == 0 or done == len(futures):
                    log(f"compiled {done}/{len(futures)} ({time.perf_counter() - start:.1f} s)")

    def report(self) -> str:
        """How many programs there are, and where they came from."""
        counts = {"from the cache": self.num_loaded, "compiled": self.num_compiled}
        told = ", ".join(f"{count} {how}" for how, count in counts.items() if count)
        return f"{self.num_loaded + self.num_compiled} programs: {told or 'none'}"

    def activation_bytes(self, stage: int, alive: int) -> int:
        """What a stage's largest program takes, with the results of `alive` steps."""
        peak = self._peaks.get(stage, _Peak())
        return peak.scratch + alive * peak.results

    def _devices(self, stage: int) -> list[Any]:
        """Whose programs a stage's are."""
        raise NotImplementedError

    def _compiler_options(self, num_tokens: int) -> Options | None:
        """What XLA is told when it compiles a step of `num_tokens`."""
        raise NotImplementedError

    def _load_all(self, jobs: list[Job], pool: ThreadPoolExecutor) -> list[Job]:
        """Loads all that can be, and returns the others."""
        missing = []
        for job, program in zip(jobs, pool.map(self._load, jobs), strict=True):
            if program is None:
                missing.append(job)
            else:
                self._keep(job, program, loaded=True)
        return missing

    def _build(self, job: Job) -> None:
        program = self._load(job)
        if program is not None:
            self._keep(job, program, loaded=True)
        else:
            self._keep(job, self._compile(job, job.lower()))

    def _load(self, job: Job) -> Program | None:
        if self._cache is None:
            return None
        return self._cache.load(self._cached_name(job), self._devices(job.stage))

    def _compile(self, job: Job, lowered: Any) -> Program:
        options = self._compiler_options(job.num_tokens)
        if self._cache is None:
            return compile_program(lowered, options)
        return self._cache.compile(self._cached_name(job), lowered, options)

    def _cached_name(self, job: Job) -> str:
        options = sorted((self._compiler_options(job.num_tokens) or {}).items())
        own = hashlib.sha256(repr((job.made_from, options)).encode()).hexdigest()
        return f"{job.name}-{own[:32]}"

    def _keep(self, job: Job, program: Program, *, loaded: bool = False) -> None:
        self.num_loaded += loaded
        self.num_compiled += not loaded
        peak = self._peaks.setdefault(job.stage, _Peak())
        peak.scratch = max(peak.scratch, program.scratch)
        peak.results = max(peak.results, program.results)
        job.store(program.compiled)
