"""The HTTP service: a frozen model that returns logits for prompts, never weights or gradients.

| | |
|---|---|
| GET /v1/info | model, classes, widths, limits, batch sizes |
| GET /v1/health | liveness; needs no key |
| GET /v1/usage | totals of the answer store |
| GET /v1/metrics | counters for Prometheus |
| PUT /v1/points/{digest} | upload points once |
| POST /v1/score | logits of (point, text prompt, image prompt) rows |

`/openapi.json` and `/docs` describe it in full. Errors are JSON: `{"error": "..."}`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import torch
from fastapi import APIRouter, FastAPI, Path, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from flops.serve import codec as wire
from flops.serve.codec import BINARY, JSON, WireError
from flops.serve.limits import retry_after
from flops.serve.schema import KEY, ScoreBody, answer_json
from flops.serve.service import LARGE, Service, Setup
from flops.serve.store import StoreError

log = logging.getLogger("flops.serve")
Digest = Annotated[
    str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the body, in hexadecimal")
]
KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A repeat of the same body under the same key is free",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"},
}
SECURED: dict[str, Any] = {"security": [{"key": []}]}
BYTES = {"type": "string", "format": "binary"}
POINTS_BODY = {"required": True, "content": {BINARY: {"schema": BYTES}}}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}},
}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    meanings = {
        400: "The body cannot be read",
        401: "Missing or wrong API key",
        404: "No such points",
        408: "The body did not arrive in time",
        409: "The key was used for another body",
        413: "The body is too large",
        415: "Unsupported content type",
        422: "Shapes, types or values do not fit",
        429: "Too many requests; see Retry-After",
        503: "The answer could not be stored; retry",
        507: "The answer store is full; stored answers are still served",
    }
    return {
        status: {"description": meanings[status], "content": {JSON: {"schema": ERROR}}}
        for status in statuses
    }


SCORE_BODY = {
    "required": True,
    "content": {BINARY: {"schema": BYTES}, JSON: {"schema": ScoreBody.model_json_schema()}},
}
router = APIRouter(prefix="/v1")


def admit(request: Request) -> Service:
    """Check the rate of wrong keys, the key (in constant time), then the rate of requests.

    Raises:
        WireError: 401 or 429.
    """
    service: Service = request.app.state.service
    if service.setup.api_key is not None:
        address = request.client.host if request.client else ""
        service.wrong_keys.check(address)
        scheme, _, shown = request.headers.get("authorization", "").partition(" ")
        marks = (hashlib.sha256(text.encode()).digest() for text in (shown, service.setup.api_key))
        if not hmac.compare_digest(*marks) or scheme.lower() != "bearer":
            service.wrong_keys.count(address)
            raise WireError("send the API key as Authorization: Bearer KEY", 401)
    service.rate.take()
    return service


@router.get("/health")
async def health() -> dict[str, str]:
    """Liveness check."""
    return {"status": "ok"}


@router.get("/info", responses=_errors(401, 429), openapi_extra=SECURED)
async def info(request: Request) -> dict[str, Any]:
    """Describe the model and the limits."""
    return admit(request).info()


@router.get("/usage", responses=_errors(401, 429), openapi_extra=SECURED)
async def usage(request: Request) -> dict[str, int]:
    """Totals of all answers in the store."""
    return await admit(request).usage()


@router.get(
    "/metrics",
    response_class=PlainTextResponse,
    responses=_errors(401, 429),
    openapi_extra=SECURED,
)
async def metrics(request: Request) -> Response:
    """Metrics in the text format of Prometheus."""
    text = admit(request).metrics.exposition()
    return PlainTextResponse(text, media_type=CONTENT_TYPE_LATEST)


@router.put(
    "/points/{digest}",
    responses={
        200: {"description": "Already stored"},
        201: {"description": "Stored"},
        **_errors(400, 401, 408, 413, 415, 422, 429, 503, 507),
    },
    openapi_extra={"requestBody": POINTS_BODY, **SECURED},
)
async def upload(digest: Digest, request: Request) -> Response:
    """Store points: safetensors {"pixels": uint8 (N, H, W[, C])}."""
    service = admit(request)
    _content(request, BINARY)
    announced, most = request.headers.get("content-length"), service.setup.limits.upload
    async with service.bodies.read(request.stream(), announced, most) as body:
        new = await service.upload(digest, body)
    return JSONResponse({"points": digest}, 201 if new else 200)


@router.post(
    "/score",
    response_class=Response,
    responses={
        200: {
            "description": "Logits (Q, C), in the content type of the request",
            "content": {BINARY: {"schema": BYTES}, JSON: {"schema": {"type": "object"}}},
        },
        **_errors(400, 401, 404, 408, 409, 413, 415, 422, 429, 503, 507),
    },
    openapi_extra={"requestBody": SCORE_BODY, "parameters": [KEY_HEADER], **SECURED},
)
async def score(request: Request) -> Response:
    """Score rows; response headers give the cost and whether it was replayed."""
    service = admit(request)
    key = request.headers.get("idempotency-key", "")
    if not KEY.fullmatch(key):
        raise WireError("the header Idempotency-Key must be 1 to 128 letters, digits or _ . : -")
    as_json = _content(request, BINARY, JSON) == JSON
    limits = service.setup.limits
    announced = request.headers.get("content-length")
    most = min(limits.body, limits.json) if as_json else limits.body
    async with service.bodies.read(request.stream(), announced, most) as body:
        answer, replayed = await service.answer(key, body, as_json)
    headers = {
        "X-Flops-Key": key,
        "X-Flops-Queries": str(answer.cost.queries),
        "X-Flops-Texts": str(answer.cost.texts),
        "X-Flops-Images": str(answer.cost.images),
        "X-Flops-Replayed": str(replayed).lower(),
    }
    if as_json:

        def written() -> Response:
            logits = wire.decode(bytearray(answer.body), {"logits": torch.float32})[0]["logits"]
            return JSONResponse(answer_json(logits, answer.cost, replayed), headers=headers)

        return written() if len(answer.body) < LARGE else await service.in_thread(written)
    headers["X-Flops-Digest"] = wire.digest(answer.body)
    return Response(answer.body, media_type=BINARY, headers=headers)


pages = APIRouter(include_in_schema=False)


@pages.get("/openapi.json")
async def schema(request: Request) -> JSONResponse:
    """The schema of the requests."""
    _admit_reader(request)
    return JSONResponse(request.app.openapi())


@pages.get("/docs")
async def docs(request: Request) -> Response:
    """The schema as a page."""
    _admit_reader(request)
    return get_swagger_ui_html(openapi_url="/openapi.json", title=request.app.title)


def _admit_reader(request: Request) -> None:
    if not request.app.state.service.setup.open_docs:
        admit(request)


def create_app(setup: Setup) -> FastAPI:
    """The service as an ASGI application.

    Args:
        setup: Model, answer store and limits; the store is closed at the end.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = Service(setup)
        yield
        app.state.service.close()

    app = FastAPI(
        title="FLOPS black box",
        version="1",
        description="Logits of a frozen model for prompts. It never returns weights or gradients.",
        lifespan=lifespan,
        openapi_url=None,  # own routes, which need the key unless the service is local
        docs_url=None,
        redoc_url=None,
    )
    app.include_router(router)
    app.include_router(pages)
    described = app.openapi()
    schemes = {"key": {"type": "http", "scheme": "bearer"}}
    described.setdefault("components", {})["securitySchemes"] = schemes
    _handlers(app)
    app.add_middleware(_Counted, service=app)
    return app


def _content(request: Request, *allowed: str) -> str:
    """The content type, if allowed."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in allowed or request.headers.get("content-encoding", "identity") != "identity":
        raise WireError(f"send the body as {' or '.join(allowed)}, not encoded otherwise", 415)
    return kind


def _handlers(app: FastAPI) -> None:
    """Every error is {"error": ...}, without internals."""

    @app.exception_handler(WireError)
    async def refused(_: Request, error: WireError) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        if error.retry_after is not None:
            headers["Retry-After"] = retry_after(error.retry_after)
        if error.status in (408, 413):
            headers["Connection"] = "close"  # the rest of the body is unread
        return JSONResponse({"error": str(error)}, error.status, headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, _: ClientDisconnect) -> JSONResponse:
        log.warning("%s %s: the client disconnected", request.method, request.url.path[:100])
        return JSONResponse({"error": "the body was not complete"}, 400)  # the client is gone

    @app.exception_handler(StoreError)
    async def unreadable(_: Request, error: StoreError) -> JSONResponse:
        log.error("%s", error)
        message = {"error": "the answer store cannot be read; retry"}
        return JSONResponse(message, 503, {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return JSONResponse({"error": f"{where}: {first['msg']}"}, 422)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "internal error; see the log of the service"}, 500)


class _Counted:
    """Counts responses by status; plain ASGI, to see every request."""

    def __init__(self, app: Any, service: FastAPI) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._service.state.service.metrics.statuses[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
