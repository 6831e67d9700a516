"""What the processes of one engine say to each other, and the connections that carry it."""

import contextlib
import ipaddress
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from jaxllm.engine.messages import AbortRequests, AddRequest, Shutdown

LONGEST_HELLO = 2**20
SILENCE_S = 20
"""How long a host may not answer until it counts as lost."""


class Hello(msgspec.Struct, tag="hello"):
    """A follower's first message.

    Attributes:
        facts: what must be equal in all processes, see facts.py.
    """

    process_id: int
    host: str
    facts: dict[str, Any]


class Welcome(msgspec.Struct, tag="welcome"):
    """All are there.

    Attributes:
        port: of JAX's own coordinator, on process 0's host.
    """

    port: int


class Loaded(msgspec.Struct, tag="loaded"):
    """A follower is ready to step."""

    facts: dict[str, Any]


class Step(msgspec.Struct, tag="step"):
    """Run the next step.

    Attributes:
        digest: of all that the steps before it gave on process 0.
    """

    digest: int


class Ended(msgspec.Struct, tag="ended"):
    """The sender, and so the group, cannot go on."""

    message: str


Message = Hello | Welcome | Loaded | Step | Ended | AddRequest | AbortRequests | Shutdown

_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


class Link:
    """A connection to another process: messages arrive whole and in order.

    Its end is seen at once when the process dies, for the system then closes the connection, and
    after SILENCE_S when the host or the network does.
    """

    def __init__(self, sock: socket.socket, name: str) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {
            "TCP_KEEPIDLE": SILENCE_S // 4,
            "TCP_KEEPINTVL": SILENCE_S // 4,
            "TCP_KEEPCNT": 3,
            "TCP_USER_TIMEOUT": SILENCE_S * 1000,
        }
        for option, value in options.items():
            if hasattr(socket, option):  # not all systems have all of them
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self.connection = Connection(sock.detach())
        self.name = name
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Does not tell whether the other is there: its end is for the receiving side to see."""
        with contextlib.suppress(OSError), self._sending:
            self.connection.send_bytes(data)

    def receive(self, longest: int | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            EOFError: there will be none.
        """
        try:
            return _decoder.decode(self.connection.recv_bytes(longest))
        except (OSError, msgspec.MsgspecError) as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        self.connection.close()


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for those who reach us as `host`; port 0 takes a free one.

    On all interfaces, since a host's own name may mean 127.0.1.1 to itself, but on the loopback
    alone where that is the address.
    """
    if _is_loopback(host):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # it may be known and yet turned off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def bind_address(host: str, port: int) -> str | None:
    """Where JAX's coordinator listens, by the same rule; None is JAX's own, all interfaces."""
    if not _is_loopback(host):
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
