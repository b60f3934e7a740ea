"""The listening socket, made before anything is loaded. Imports nothing heavy."""

import socket


def bind(host: str, port: int, backlog: int = 2048) -> socket.socket:
    """A listening TCP socket for ``serve``; port 0 takes a free one (``getsockname`` tells which).

    For use before a model is loaded: a taken port is an ``OSError`` at once, which names it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise OSError(f"host {host!r} cannot be resolved: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening now makes a second server on this port fail; nothing is accepted before serve().
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise OSError(
            error.errno,
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port",
        ) from error
    listener.setblocking(False)
    return listener
