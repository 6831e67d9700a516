"""Clients that keep a server busy while something else happens to it."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

REQUEST = {"max_tokens": 24, "ignore_eos": True, "temperature": 0}


@dataclass
class Load:
    """Threads that send short requests, one after the other, until the block ends.

    Attributes:
        answers: and when each was asked for, by the monotonic clock.
    """

    url: str
    answers: list[tuple[float, httpx.Response]] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    pause_s: float = 0.0

    @contextmanager
    def running(self, threads: int = 4) -> Iterator[None]:
        with ThreadPoolExecutor(threads) as pool:
            sent = [pool.submit(self._send, f"load {i} ") for i in range(threads)]
            try:
                yield
            finally:
                self.stopped.set()
            for each in sent:
                each.result()

    def _send(self, prompt: str) -> None:
        number = 0
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while not self.stopped.is_set():
                number += 1
                started = time.monotonic()
                body = {**REQUEST, "prompt": f"{prompt}{number}"}
                self.answers.append((started, http.post("/v1/completions", json=body)))
                self.stopped.wait(self.pause_s)

    def failed(self) -> list[tuple[float, httpx.Response]]:
        return [(at, answer) for at, answer in self.answers if answer.status_code != 200]
