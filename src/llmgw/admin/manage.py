"""The operator port's JSON endpoints: requests become calls of a Management, and its answers JSON."""

from __future__ import annotations

import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException

from llmgw.admin.following import Followers
from llmgw.admin.guard import check_caller
from llmgw.admin.management import Management, Refused
from llmgw.admin.reading import (
    CollectWeights,
    Cordon,
    DrainBy,
    Labels,
    Load,
    NewModels,
    Plan,
    PullWeights,
    Rollback,
    Stop,
    ToolCheck,
    WhatIf,
    read_body,
    read_since,
)
from llmgw.admin.views import encode
from llmgw.errors import ConfigError, LlmgwError, Problem

MAX_BODY_BYTES = 1024 * 1024
MAX_SHOWN_PATH = 200


def create_app(management: Management, *, listen_host: str) -> QuartTrio:
    """The endpoints as one app, for a port that listens on ``listen_host``."""
    app = QuartTrio("llmgw.admin", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    app.url_map.merge_slashes = False
    followers = Followers(management)

    @app.before_request
    async def check() -> None:
        headers = request.headers
        check_caller(
            listen_host,
            hosts=headers.getlist("Host"),
            origins=headers.getlist("Origin"),
            fetch_sites=headers.getlist("Sec-Fetch-Site"),
        )

    @app.get("/status")
    async def status() -> Response:
        return _answer(await management.status())

    @app.get("/nodes")
    async def nodes() -> Response:
        return await _answer_at_length({"nodes": await management.nodes()})

    @app.post("/nodes/<name>/cordon")
    async def cordon(name: str) -> Response:
        asked = await read_body(Cordon)
        return _answer(await management.cordon(name, cordoned=asked.cordoned))

    @app.post("/nodes/<name>/drain")
    async def drain(name: str) -> Response:
        asked = await read_body(DrainBy)
        return _answer(await management.drain(name, deadline_seconds=asked.deadline_seconds))

    @app.post("/nodes/<name>/labels")
    async def label(name: str) -> Response:
        asked = await read_body(Labels)
        return _answer(await management.label(name, asked.labels))

    @app.delete("/nodes/<name>")
    async def remove_node(name: str) -> Response:
        return _answer(await management.remove_node(name))

    @app.get("/engines")
    async def engines() -> Response:
        return await _answer_at_length(await management.engines())

    @app.get("/models")
    async def models() -> Response:
        return _answer({"models": management.models()})

    @app.get("/replicas")
    async def replicas() -> Response:
        return _answer({"replicas": management.replicas(request.args.get("model"))})

    @app.get("/models/<path:name>")
    async def model(name: str) -> Response:
        return _answer(management.model(name))

    @app.get("/placement/<path:name>")
    async def placement(name: str) -> Response:
        return await _answer_at_length(await management.explain(name))

    @app.post("/placement")
    async def what_if() -> Response:
        asked = await read_body(WhatIf)
        return await _answer_at_length({"models": await management.explain_what_if(asked.file, asked.text)})

    @app.post("/plan")
    async def plan() -> Response:
        asked = await read_body(Plan)
        return await _answer_at_length(await management.plan(asked.needs()))

    # A path of its own: of "/models/a/history" nobody could tell whether a model is called so.
    @app.get("/history/<path:name>")
    async def history(name: str) -> Response:
        return await _answer_at_length(await management.history(name))

    @app.get("/facts/<path:name>")
    async def facts(name: str) -> Response:
        return _answer(await management.facts(name))

    @app.delete("/facts/<path:name>")
    async def forget_facts(name: str) -> Response:
        return _answer(await management.forget_facts(name))

    @app.get("/events")
    async def events() -> Response:
        return await _answer_at_length(await followers.look(read_since()))

    @app.get("/decisions")
    async def decisions() -> Response:
        return _answer({"decisions": management.decisions()})

    @app.post("/models")
    async def add() -> Response:
        asked = await read_body(NewModels)
        return _answer({"models": await management.add(asked.file, asked.text, replace=asked.replace)})

    @app.delete("/models/<path:name>")
    async def remove(name: str) -> Response:
        return _answer(await management.remove(name))

    @app.post("/rollback")
    async def rollback() -> Response:
        asked = await read_body(Rollback)
        return _answer(await management.rollback(asked.model, asked.number))

    @app.post("/stop")
    async def stop() -> Response:
        asked = await read_body(Stop)
        return _answer(await management.stop(asked.name))

    @app.post("/load")
    async def load() -> Response:
        asked = await read_body(Load)
        return _answer(await management.load(asked.model))

    @app.get("/weights")
    async def weights() -> Response:
        return await _answer_at_length(await management.weights())

    @app.post("/weights/pull")
    async def pull_weights() -> Response:
        asked = await read_body(PullWeights)
        return await _answer_at_length(await management.pull_weights(asked.source, asked.nodes))

    @app.get("/weights/pull/<int:number>")
    async def pull(number: int) -> Response:
        return await _answer_at_length(await management.pull(number))

    @app.post("/weights/collect")
    async def collect_weights() -> Response:
        await read_body(CollectWeights)
        return await _answer_at_length(await management.collect_weights())

    @app.post("/reload")
    async def reload() -> Response:
        return _answer(await management.reload())

    @app.post("/tool-check")
    async def tool_check() -> Response:
        asked = await read_body(ToolCheck)
        return _answer(await management.tool_check(asked.model, asked.replica))

    @app.errorhandler(HTTPException)
    async def refuse(error: HTTPException) -> Response:
        response = _refusal(_refused_by_quart(error, request.method, request.path))
        for name, value in error.get_headers(None):
            if name.lower() not in {"content-type", "content-length"}:
                response.headers[name] = value
        return response

    @app.errorhandler(Refused)
    async def tell(error: Refused) -> Response:
        return _refusal(error)

    @app.errorhandler(ConfigError)
    async def place(error: ConfigError) -> Response:
        message = "this can't be used as it is written"
        return _refusal(Refused(message, status=400, code="invalid_config", problems=error.problems))

    @app.errorhandler(LlmgwError)
    async def explain(error: LlmgwError) -> Response:
        app.logger.error("%s %s: %s", request.method, request.path[:MAX_SHOWN_PATH], error.message)
        return _refusal(Refused(error.message, status=500, code="failed"))

    @app.errorhandler(Exception)
    async def fail(error: Exception) -> Response:
        app.logger.error("%s %s failed", request.method, request.path[:MAX_SHOWN_PATH], exc_info=error)
        return _refusal(Refused("llmgw failed at this: its log says why", status=500, code="internal_error"))

    @app.after_request
    async def harden(response: Response) -> Response:
        response.headers["Cache-Control"] = "no-store"
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    return app


def _answer(view: object, status: int = 200) -> Response:
    return Response(encode(view), status, content_type="application/json")


async def _answer_at_length(view: object) -> Response:
    # What grows with the fleet takes longer to write than a turn of the loop may.
    return Response(await trio.to_thread.run_sync(encode, view), 200, content_type="application/json")


def _refusal(refused: Refused) -> Response:
    facts: dict[str, object] = {"code": refused.code, "message": refused.message}
    if refused.problems:
        facts["problems"] = [_problem(problem) for problem in refused.problems]
    return _answer({"error": facts}, refused.status)


def _problem(problem: Problem) -> dict[str, str | None]:
    return {"key": problem.key or None, "where": problem.where or None, "message": problem.message}


def _refused_by_quart(error: HTTPException, method: str, path: str) -> Refused:
    """What Quart refused, in our words."""
    shown = path if len(path) <= MAX_SHOWN_PATH else f"{path[:MAX_SHOWN_PATH]}…"
    match error.code:
        case 404:
            message = f"nothing is served at {method} {shown}: docs/ctl.md names what is"
            return Refused(message, status=404, code="unknown_url")
        case 405:
            allowed = ", ".join(sorted(getattr(error, "valid_methods", None) or ()))
            message = f"{method} is not possible at {shown}: use one of {allowed}"
            return Refused(message, status=405, code="method_not_allowed")
        case 413:
            message = f"the body is larger than {MAX_BODY_BYTES // 1024} KiB: not a definition"
            return Refused(message, status=413, code="request_too_large")
        case int(status) if status < 500:
            message = f"{method} {shown} can't be answered: {error.description or error.name}"
            return Refused(message, status=status, code="invalid_request")
        case _:
            return Refused("llmgw failed at this: its log says why", status=500, code="internal_error")
