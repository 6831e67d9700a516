"""The processes of an engine once they have met: orders go one way, ends are seen by all."""

import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any, NoReturn

from jaxllm.engine.distributed.facts import difference
from jaxllm.engine.distributed.links import Ended, Link, Loaded, Message, encode
from jaxllm.engine.messages import Shutdown

Fail = Callable[[str], NoReturn]
"""Ends this process, giving the front its reason; from any thread."""

GRACE_S = 2.0
"""What a process that fails leaves the others to say that it is for one who died."""
LAST_WORDS_S = 1.0


def _lost(name: str) -> str:
    return (
        f"{name.capitalize()} was lost: its connection closed. The others cannot go on without it."
    )


class Leader:
    """Process 0's view. A thread watches the others, since a step may wait for one for ever.

    Args:
        links: by process id.
    """

    is_leader = True

    def __init__(self, links: dict[int, Link], fail: Fail) -> None:
        self._links = links
        self._fail = fail
        self._ending = False
        self._loaded: SimpleQueue[tuple[int, dict[str, Any]]] = SimpleQueue()
        self._all_gone = threading.Event()
        threading.Thread(target=self._watch, name="group", daemon=True).start()

    def send(self, message: Message) -> None:
        """To all, in the order of the calls."""
        data = encode(message)
        for link in self._links.values():
            link.send_encoded(data)

    def wait_loaded(self, facts: dict[str, Any]) -> None:
        """Waits until all are ready to step.

        Raises:
            ValueError: one came to another result than we; says in what.
        """
        for _ in self._links:
            process_id, theirs = self._loaded.get()
            differs = difference(facts, theirs, process_id)
            if differs is not None:
                raise ValueError(differs)

    def report(self, why: str) -> None:
        """Tells all that this process fails, unless one of them did first."""
        time.sleep(GRACE_S)
        self._tell(f"Process 0 failed: {why}")

    def end(self) -> None:
        """Has all end well, and waits for that a while."""
        self._ending = True
        self.send(Shutdown())
        self._all_gone.wait(GRACE_S)

    def _tell(self, why: str) -> None:
        # One who is stuck may not take it: this must not keep us.
        thread = threading.Thread(target=self.send, args=(Ended(why),), daemon=True)
        thread.start()
        thread.join(LAST_WORDS_S)

    def _watch(self) -> None:
        links = {link.connection: (i, link) for i, link in self._links.items()}
        while links:
            for connection in wait(list(links)):
                process_id, link = links[connection]  # pyright: ignore[reportArgumentType]
                try:
                    message = link.receive()
                except EOFError:
                    if not self._ending:
                        self._give_up(_lost(link.name))
                    del links[connection]  # pyright: ignore[reportArgumentType]
                    continue
                if isinstance(message, Loaded):
                    self._loaded.put((process_id, message.facts))
                elif isinstance(message, Ended) and not self._ending:
                    self._give_up(f"{link.name.capitalize()} failed: {message.message}")
        self._all_gone.set()

    def _give_up(self, why: str) -> NoReturn:
        self._tell(why)
        self._fail(why)


class Follower:
    """The view of every other process. A thread reads, since the end must be seen at any time.

    Args:
        leave: ends this process well.
    """

    is_leader = False

    def __init__(self, link: Link, fail: Fail, leave: Callable[[], NoReturn]) -> None:
        self._link = link
        self._fail = fail
        self._leave = leave
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._read, name="group", daemon=True).start()

    def receive(self) -> Message:
        """The next order; waits for it."""
        return self._inbox.get()

    def loaded(self, facts: dict[str, Any]) -> None:
        self._link.send(Loaded(facts))

    def report(self, why: str) -> None:
        """Tells process 0 that this one fails, unless another did first."""
        time.sleep(GRACE_S)
        self._link.send(Ended(why))

    def _read(self) -> None:
        while True:
            try:
                message = self._link.receive()
            except EOFError:
                self._fail(_lost(self._link.name))
            if isinstance(message, Shutdown):
                self._leave()
            if isinstance(message, Ended):
                self._fail(message.message)
            self._inbox.put(message)


Group = Leader | Follower
