"""The first page, which says what runs and how to ask it, and the answer to every path that nothing else serves."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

from markupsafe import Markup
from quart import Response, render_template, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, InternalServerError

from llmgw.dialects.openai import error_body
from llmgw.dialects.refusal import Refusal
from llmgw.web.snapshot import ModelShown, ModelState, Snapshot

TEMPLATES = Path(__file__).parent / "templates"
# Under these a client is a program, whatever it says that it accepts.
API_PREFIXES = ("/v1", "/api")
MAX_SHOWN_PATH = 200
HTML = "text/html; charset=utf-8"


def create_app(snapshot: Callable[[], Snapshot]) -> QuartTrio:
    """The pages as one app; ``snapshot`` is called once for each page, between two awaits, and must not block."""
    app = QuartTrio("llmgw.web", template_folder=str(TEMPLATES), static_folder=None, root_path=str(TEMPLATES.parent))
    # A path is what the client wrote: no redirect from "//" to an address built out of the request's own Host.
    app.url_map.merge_slashes = False
    style = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    policy = _content_policy(style)

    async def page(template: str, status: int, **facts: object) -> Response:
        text = await render_template(template, style=Markup(style), **facts)  # noqa: S704 - our own file
        response = Response(text, status, content_type=HTML)
        response.headers["Content-Security-Policy"] = policy
        return response

    @app.get("/")
    async def landing() -> Response:
        now = snapshot()
        return await page("landing.html", 200, now=now, curl=_curl(now), loading=_any_loading(now))

    @app.errorhandler(HTTPException)
    async def refuse(error: HTTPException) -> Response:
        # as it came: request.path has one slash before it, however many there were
        refusal = _refusal_of(error, request.method, request.scope["path"])
        if _wants_page():
            response = await page("refusal.html", refusal.status, refusal=refusal)
        else:
            response = Response(error_body(refusal), refusal.status, content_type="application/json")
        for name, value in error.get_headers(None):
            if name.lower() not in {"content-type", "content-length"}:
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def fail(error: Exception) -> Response:
        app.logger.error("%s %s failed", request.method, request.path[:MAX_SHOWN_PATH], exc_info=error)
        return await refuse(InternalServerError())

    @app.after_request
    async def harden(response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        return response

    return app


def _wants_page() -> bool:
    """Browsers name text/html; programs accept anything, or JSON."""
    inside_api = any(request.path == prefix or request.path.startswith(f"{prefix}/") for prefix in API_PREFIXES)
    return not inside_api and any(value == "text/html" for value, _ in request.accept_mimetypes)


def _refusal_of(error: HTTPException, method: str, path: str) -> Refusal:
    """What Quart refused, in our words: a message that says what to do, and a code for programs."""
    shown = path if len(path) <= MAX_SHOWN_PATH else f"{path[:MAX_SHOWN_PATH]}…"
    match error.code:
        case 404:
            message = f"Nothing is served at {method} {shown}. GET / says what runs here."
            return Refusal(status=404, code="unknown_url", message=message)
        case 405:
            allowed = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
            message = f"{method} is not possible at {shown}: use one of {allowed}."
            return Refusal(status=405, code="method_not_allowed", message=message)
        case 413:
            message = f"The body of {method} {shown} is too large for a page."
            return Refusal(status=413, code="request_too_large", message=message)
        case int(status) if status < 500:
            message = f"{method} {shown} can't be answered: {error.description or error.name}"
            return Refusal(status=status, code="invalid_request", message=message)
        case _:
            message = "The page could not be made: the log of llmgw says why."
            return Refusal(status=500, code="internal_error", message=message)


def _any_loading(now: Snapshot) -> bool:
    return any(model.state in {ModelState.LOADING, ModelState.WAITING} for model in now.models)


def _curl(now: Snapshot) -> str | None:
    """A line to paste that works now: None while there is no model to ask."""
    model = _best(now.models)
    if model is None:
        return None
    body = {"model": model.name, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    return (
        f"curl -N {shlex.quote(f'{now.base_url}/chat/completions')} \\\n"
        f"  -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))}"
    )


def _best(models: tuple[ModelShown, ...]) -> ModelShown | None:
    serving = [model for model in models if model.state is ModelState.SERVING]
    return next(iter(serving or models), None)


def _content_policy(style: str) -> str:
    """Nothing but our own style is taken by the browser, whatever gets into a page."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
