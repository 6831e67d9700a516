"""How the processes of an engine find each other, before JAX does anything."""

import contextlib
import logging
import socket
import time
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.distributed.facts import difference
from jaxllm.engine.distributed.links import (
    LONGEST_HELLO,
    Ended,
    Hello,
    Link,
    Welcome,
    listen,
    split_address,
)

logger = logging.getLogger(__name__)

HELLO_S = 5.0
RETRY_S = 0.5


def wait_for_all(config: EngineConfig, facts: dict[str, Any]) -> dict[int, Link]:
    """Process 0's side: a link to every other process, by its id.

    Raises:
        ValueError: a process differs in `facts`; says in which.
        TimeoutError: not all came within --join-timeout; says who did not.
        OSError: the address cannot be listened at.
    """
    assert config.coordinator_address
    assert config.num_processes
    others = range(1, config.num_processes)
    links: dict[int, Link] = {}
    end = time.monotonic() + config.join_timeout
    with _listen(config.coordinator_address) as server:
        logger.info("Waiting at %s for %d processes", config.coordinator_address, len(others))
        while True:
            # Nobody has anything to say yet: what can be read is the end of one who gave up.
            links = {i: link for i, link in links.items() if not link.connection.poll()}
            left = end - time.monotonic()
            if len(links) == len(others):
                return links
            if left <= 0:
                missing = ", ".join(str(i) for i in others if i not in links)
                error = TimeoutError(
                    f"{len(links) + 1} of {config.num_processes} processes joined at "
                    f"{config.coordinator_address} within {config.join_timeout} s "
                    f"(--join-timeout); missing: {missing}."
                )
                _end(links, str(error))
                raise error
            server.settimeout(min(left, 1.0))
            with contextlib.suppress(TimeoutError):
                _greet(server.accept()[0], links, others, facts)


def _listen(address: str) -> socket.socket:
    try:
        return listen(*split_address(address))
    except OSError as error:
        raise OSError(f"--coordinator-address {address} cannot be listened at: {error}.") from None


def _greet(
    sock: socket.socket, links: dict[int, Link], others: range, facts: dict[str, Any]
) -> None:
    """Takes a process in; whoever is none of ours is sent away."""
    link = Link(sock, "")
    try:
        hello = link.receive(LONGEST_HELLO) if link.connection.poll(HELLO_S) else None
    except EOFError:
        hello = None
    if not isinstance(hello, Hello):
        link.close()
        return
    number = hello.process_id
    differs = difference(facts, hello.facts, number)
    if differs is not None:
        _end({**links, number: link}, differs)
        raise ValueError(differs)
    if number in links or number not in others:
        why = "has joined already" if number in links else f"is not one of {list(others)}"
        link.send(Ended(f"Process {number} {why}: see --process-id."))
        link.close()
        return
    link.name = f"process {number} of {len(others) + 1} ({hello.host})"
    links[number] = link
    logger.info("%s has joined", link.name.capitalize())


def _end(links: dict[int, Link], why: str) -> None:
    for link in links.values():
        link.send(Ended(why))
        link.close()


def find_leader(config: EngineConfig, facts: dict[str, Any]) -> tuple[Link, int]:
    """A follower's side: the link to process 0, once all are there, and the port of JAX there.

    Raises:
        TimeoutError: process 0 did not appear within --join-timeout.
        ValueError: process 0 refuses; says why.
        ConnectionError: process 0 ended before all were there.
    """
    assert config.coordinator_address
    assert config.process_id is not None
    name = f"process 0 of {config.num_processes} ({config.coordinator_address})"
    link = Link(_connect(config, name), name)
    link.send(Hello(config.process_id, socket.gethostname(), facts))
    try:
        answer = link.receive()
    except EOFError:
        raise ConnectionError(f"{name.capitalize()} ended while it waited for others.") from None
    if isinstance(answer, Ended):
        raise ValueError(answer.message)
    assert isinstance(answer, Welcome)
    return link, answer.port


def _connect(config: EngineConfig, name: str) -> socket.socket:
    assert config.coordinator_address
    logger.info("Looking for %s", name)
    end = time.monotonic() + config.join_timeout
    while True:
        try:
            return socket.create_connection(split_address(config.coordinator_address), HELLO_S)
        except OSError as error:  # not there yet, or its name is not known yet
            if time.monotonic() >= end:
                raise TimeoutError(
                    f"{name.capitalize()} did not appear within {config.join_timeout} s "
                    f"(--join-timeout): {error}. Start it, and check --coordinator-address."
                ) from None
        time.sleep(RETRY_S)
