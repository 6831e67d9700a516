"""The listening socket, opened before anything slow is done."""

import errno
import socket

from jaxllm.serve.options import ServeConfig

BACKLOG = 2048


class ListenError(OSError):
    """The address cannot be had; the message is meant for the user."""


def open_socket(config: ServeConfig) -> socket.socket:
    """A listening socket at the configured address; without a host, on all, IPv4 and IPv6.

    Raises:
        ListenError: the port is taken, or the address is not ours.
    """
    host, port = config.host, config.port
    try:
        if host is None and socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)  # pyright: ignore
    except OSError as error:
        raise ListenError(_explain(error, host or "all addresses", port)) from None


def _explain(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another process: stop it or give another --port."
    if error.errno == errno.EACCES:
        return f"Port {port} may not be opened by this user: give a --port from 1024 on."
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is no address of this machine: {error.strerror}."
    return f"Cannot listen on {host}, port {port}: {error}."


def shown_url(sock: socket.socket) -> str:
    """A URL at which the server can be reached from this machine."""
    host, port = sock.getsockname()[:2]
    if host in ("::", "0.0.0.0", ""):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
