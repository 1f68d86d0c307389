"""A uvicorn server in a thread beside the training, on the loopback interface."""

from __future__ import annotations

import socket
import threading
from typing import Any

from grpo_lit.errors import SystemFault, UserError

HOST = "127.0.0.1"


class LiveServer:
    """Serves an application until `close`.

    Args:
        app: an ASGI application.
        port: on 127.0.0.1; 0 takes a free one.

    Raises:
        UserError: a port out of range.
        SystemFault: uvicorn is missing, or the port is taken.
    """

    def __init__(self, app: Any, port: int) -> None:
        if not 0 <= port <= 65535:
            raise UserError("profiler.port", port, "from 0 (any free one) to 65535")
        require_server()
        import uvicorn

        try:
            self._socket = socket.create_server((HOST, port))
        except OSError as error:
            raise SystemFault(
                f"profiler.port={port}: {HOST} refuses it ({error.strerror}); 0 takes a free one"
            ) from error
        self.port = int(self._socket.getsockname()[1])
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off", server_header=False)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="live-page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.port}/"

    def close(self) -> None:
        """Stop serving; waits a few seconds for open requests."""
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()


def require_server() -> None:
    """See that the libraries of the page are installed.

    Raises:
        SystemFault: they are not.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise SystemFault("profiler.live needs starlette and uvicorn: pip install 'grpo-lit[live]'") from error
