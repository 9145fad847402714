"""The web server of `view`: the files of the page, and answers as JSON for clients with the token.

Everything is read-only. Requests need the token (once in the address, then as a cookie) and a host name of this
machine, so that no other page in the browser can read a run. The page may only load its own files.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from ipaddress import ip_address
from typing import Annotated, TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import RedirectResponse

from pipelinerl.analysis.view import answers
from pipelinerl.analysis.view.answers import Answers
from pipelinerl.analysis.view.rollout_index import Filter, Order
from pipelinerl.analysis.view.watched_run import Source, WatchedRun
from pipelinerl.commands import typed
from pipelinerl.errors import StreamError
from pipelinerl.tracking.token_text import one_line

LOCAL_HOSTS = frozenset({"localhost"})
#: In an order in which each imports only those before it.
PAGE_MODULES = (
    *("dom", "format", "source", "charts", "overview", "rollouts", "tokens", "rollout", "problem", "compare"),
    "main",
)
PAGE_FILES = {
    "index.html": "text/html",
    "style.css": "text/css",
    "uPlot.min.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    **{f"{name}.js": "text/javascript" for name in PAGE_MODULES},
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MAX_ROWS = 2000
#: No record, version or step has a larger number.
_MAX_NUMBER = 2**31 - 1

#: OFFSET.PLACE, separated by commas. The page asks for 25 at once.
_PLACES = r"^[0-9]{1,10}\.[0-9]{1,10}(,[0-9]{1,10}\.[0-9]{1,10}){0,199}$"

T = TypeVar("T", int, float)

Number = Annotated[int | None, Query(ge=0, le=_MAX_NUMBER)]
Offset = Annotated[int, Query(ge=0, le=_MAX_NUMBER)]
Text = Annotated[str | None, Query(max_length=1000)]


def page_file(name: str) -> str:
    """A file of the page."""
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


def make_app(runs: list[WatchedRun], token: str, hosts: frozenset[str] = LOCAL_HOSTS) -> FastAPI:
    """The application.

    Args:
        runs: the runs to show, in this order.
        token: secret that requests need.
        hosts: host names of the server that requests may use, besides IP addresses.
    """
    app = FastAPI(title="pipelinerl view", openapi_url=None)
    _guard(app, token, hosts)
    _serve_page(app)
    _serve_runs(app, Answers(runs))
    _serve_rollouts(app, Answers(runs))
    return app


def json_of(value: object) -> bytes:
    return msgspec.json.encode(value)


def _guard(app: FastAPI, token: str, hosts: frozenset[str]) -> None:
    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        cookie = f"pipelinerl-view-{request.url.port or 80}"
        given = request.query_params.get("token")
        known = given if given is not None else request.cookies.get(cookie, "")
        if not _is_known(_host_name(request.headers.get("host", "")), hosts):
            response = Response("This server only answers to its own name.", 421)
        elif not hmac.compare_digest(known.encode(), token.encode()):
            response = Response(f"Open the address that `{typed('view')}` printed, with its token.", 403)
        elif given is not None:
            # Keeps the token out of the browser's address bar and history.
            response = RedirectResponse("/", 303)
            response.set_cookie(cookie, token, httponly=True, samesite="strict")
        else:
            response = await call_next(request)
        response.headers.update(_HEADERS)
        return response


def _host_name(host: str) -> str:
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


def _is_known(name: str, hosts: frozenset[str]) -> bool:
    """Whether the request cannot come from another site, which would have to let a name of its own point to us."""
    with suppress(ValueError):
        ip_address(name.strip("[]"))
        return True
    return name in hosts


def _serve_page(app: FastAPI) -> None:
    contents = {name: page_file(name).encode() for name in PAGE_FILES}

    @app.get("/")
    def index() -> Response:
        return Response(contents["index.html"], media_type="text/html")

    @app.get("/page/{name}")
    def page(name: str) -> Response:
        if name not in contents:
            raise HTTPException(404)
        return Response(contents[name], media_type=PAGE_FILES[name])


def _run(found: Answers, number: int) -> WatchedRun:
    if not 0 <= number < len(found.runs):
        raise HTTPException(404, f"run {number}: there are {len(found.runs)}")
    return found.runs[number]


def _json(value: object) -> Response:
    return Response(json_of(value), media_type="application/json")


def _serve_runs(app: FastAPI, found: Answers) -> None:
    @app.get("/api/runs")
    def runs() -> Response:
        return _json(found.list_runs())

    def add(name: str, answer: Callable[[WatchedRun], object]) -> None:
        @app.get(f"/api/runs/{{number}}/{name}")
        def about(number: int) -> Response:
            return _json(answer(_run(found, number)))

    add("pulse", found.pulse)
    add("overview", found.overview)
    add("metrics", found.metric_names)

    @app.get("/api/runs/{number}/curves")
    def curves(number: int, names: Annotated[str, Query(max_length=10_000)]) -> Response:
        return _json(found.curves(_run(found, number), names.split(",")))


def _serve_rollouts(app: FastAPI, found: Answers) -> None:
    @app.exception_handler(StreamError)
    def unreadable(request: Request, error: Exception) -> Response:
        return Response(one_line(str(error)), 404)

    @app.get("/api/runs/{number}/rollouts")
    def rollouts(
        number: int,
        source: Source = "training",
        order: Order = "newest",
        step_from: Number = None,
        step_to: Number = None,
        version_from: Number = None,
        version_to: Number = None,
        reward_from: float | None = None,
        reward_to: float | None = None,
        group: Text = None,
        problem: Text = None,
        dataset: Text = None,
        success: bool | None = None,
        cut: bool | None = None,
        failed: bool = False,
        failure: Text = None,
        text: Text = None,
        below: Number = None,
        skip: Annotated[int, Query(ge=0, le=_MAX_NUMBER)] = 0,
        count: Annotated[int, Query(ge=1, le=_MAX_ROWS)] = 50,
    ) -> Response:
        wanted = Filter(
            versions=_range(version_from, version_to, 0, _MAX_NUMBER),
            reward=_range(reward_from, reward_to, float("-inf"), float("inf")),
            group=group,
            problem=problem,
            dataset=dataset,
            success=success,
            is_cut=cut,
            failure=failure,
            is_failed=failed,
        )
        steps = _range(step_from, step_to, 0, _MAX_NUMBER)
        query = answers.Query(source, wanted, steps, text or "", order, below, skip, count)
        return _json(found.rollouts(_run(found, number), query))

    @app.get("/api/runs/{number}/previews")
    def previews(number: int, at: Annotated[str, Query(pattern=_PLACES)], source: Source = "training") -> Response:
        pairs = [pair.split(".") for pair in at.split(",")]
        places = [(int(offset), int(place)) for offset, place in pairs]
        return _json(found.previews(_run(found, number), source, places))

    @app.get("/api/runs/{number}/group")
    def group(number: int, offset: Offset, source: Source = "training", whole: bool = False) -> Response:
        return _json(found.group(_run(found, number), source, offset, whole))

    @app.get("/api/runs/{number}/tokens")
    def tokens(
        number: int,
        offset: Offset,
        place: Offset,
        sample: Offset = 0,
        start: Offset = 0,
        source: Source = "training",
    ) -> Response:
        return _json(found.tokens(_run(found, number), source, offset, place, sample, start))


def _range(low: T | None, high: T | None, least: T, most: T) -> tuple[T, T] | None:
    return None if low is None and high is None else (least if low is None else low, most if high is None else high)
