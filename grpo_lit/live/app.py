"""The HTTP side of the live page: JSON endpoints and one page, for this machine only."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from grpo_lit.errors import UserError
from grpo_lit.live.state import CHANNELS, SCHEMA_VERSION, LiveState
from grpo_lit.live.trace import Refused, TraceControl, TraceRequest

HOSTS = ["127.0.0.1", "localhost"]
MAX_BODY_BYTES = 65_536
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def create_app(state: LiveState, trace: TraceControl) -> Starlette:
    """The application over a run's state.

    A page of another site that resolves its own name to 127.0.0.1 (DNS rebinding) is refused by its Host header; a
    request that changes something must not come from another origin.

    Args:
        state: what is shown.
        trace: starts and stops recordings.
    """

    async def page(request: Request) -> Response:
        del request
        text = (files("grpo_lit") / "assets" / "live" / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=_HEADERS)

    async def status(request: Request) -> Response:
        del request
        return _json({**state.status(), "trace": trace.status()})

    routes = [
        Route("/", page),
        Route("/api/status", status),
        *(Route(f"/api/{name}", _channel(state, name)) for name in CHANNELS),
        *_trace_routes(trace),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])


def _channel(state: LiveState, name: str) -> Callable[[Request], Awaitable[Response]]:
    """Rows of one of the state's channels, from a step on."""

    async def read(request: Request) -> Response:
        try:
            since, limit = (_whole(request, key, default) for key, default in (("since_step", 0), ("limit", 500)))
        except UserError as error:
            return _error(400, str(error))
        return _json(state.read(name, since_step=since, limit=limit))

    return read


def _trace_routes(trace: TraceControl) -> list[Route]:
    """Start, stop and fetch a recording."""

    async def status(request: Request) -> Response:
        del request
        return _json(trace.status())

    def start(body: bytes) -> Response:
        try:
            return _json(trace.start(_trace_request(body)), status=202)
        except UserError as error:
            return _error(400, str(error))
        except Refused as refused:
            return _error(refused.status, str(refused))

    def stop(body: bytes) -> Response:
        del body
        try:
            return _json(trace.stop(), status=202)
        except Refused as refused:
            return _error(refused.status, str(refused))

    async def file(request: Request) -> Response:
        del request
        if trace.state != "done" or not trace.file.is_file():
            return _error(404, "no trace has been recorded")
        return FileResponse(trace.file, media_type="application/json", filename="trace.json", headers=_HEADERS)

    return [
        Route("/api/trace", status),
        Route("/api/trace/start", _guarded(start), methods=["POST"]),
        Route("/api/trace/stop", _guarded(stop), methods=["POST"]),
        Route("/api/trace/file", file),
    ]


def _guarded(endpoint: Callable[[bytes], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Refuse requests that another site's page makes a browser send, and bodies of any size; hand the body on."""

    async def guarded(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None and origin != f"http://{request.headers.get('host')}":
            return _error(403, "requests from other origins are refused")
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "send Content-Type: application/json")
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return _error(413, f"send at most {MAX_BODY_BYTES} bytes")
        return endpoint(bytes(body))

    return guarded


def _whole(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or len(text) > 12:
        raise UserError(name, text, "a whole number")
    return int(text)


def _trace_request(body: bytes) -> TraceRequest:
    """The request in a JSON body; empty for the defaults.

    Raises:
        UserError: unknown or wrong fields.
    """
    try:
        given = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UserError("body", body[:80], "a JSON object") from error
    known = {f.name: f.default for f in fields(TraceRequest)}
    if not isinstance(given, dict) or set(given) - set(known):
        raise UserError("body", given, f"a JSON object with {', '.join(known)}")
    for name, value in given.items():
        kinds: tuple[type, ...] = (str, type(None)) if name == "phase" else (type(known[name]),)
        if type(value) not in kinds:
            raise UserError(name, value, f"a {kinds[0].__name__}")
    return TraceRequest(**given)


def _json(content: dict[str, Any], status: int = 200) -> Response:
    envelope = {"schema_version": SCHEMA_VERSION, "time": time.time(), **content}
    return JSONResponse(envelope, status_code=status, headers=_HEADERS)


def _error(status: int, text: str) -> Response:
    return _json({"error": text}, status)
