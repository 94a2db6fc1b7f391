"""The OpenAI HTTP API: a thin adapter that turns JSON into submissions and output deltas into JSON.

The status line waits for the first token, so that an error before it has the right status; an error after it is an event of the stream.
Fields that change the answer and are not supported are refused by name; unknown fields are accepted.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Self, TypeVar

from aiohttp import web

from conductor.answer import OutputDelta
from conductor.openai_schema import Body, ChatBody, chat_message, completion_prompt, parse, parse_completion
from conductor.openai_shapes import ChatShape, ChunkWriter, CompletionShape, Shape, sse_event, usage_json
from conductor.service import Conductor
from conductor.tenants import Tenant, TenantDirectory
from conductor.validation import ChatPrompt, GenerateParams, Prompt, RequestId, Submission, Wishes, check_request_id
from moontide.errors import BadRequest, Internal, ModelNotFound, MoontideError, Rejected, Unauthorized
from moontide.log import get_logger
from moontide.metrics import HealthServer
from moontide.tls import Tls

REQUEST_ID_HEADER = "X-Request-Id"
TTFT_SLO_HEADER = "X-Moontide-TTFT-SLO"
"""Seconds, as the next one."""
TBT_SLO_HEADER = "X-Moontide-TBT-SLO"
PRIORITY_HEADER = "X-Moontide-Priority"
IDEMPOTENCY_HEADER = "Idempotency-Key"
RETRY_AFTER_S = 1
"""What a client that was refused for lack of capacity is told to wait at least, and where nothing more is known."""

CLIENT_CLOSED_REQUEST = 499
"""What proxies log when a client hangs up."""
LEAVE_POLL_S = 0.05
CLIENT_STALL_S = 60.0
"""A client that sends nothing of its body, or reads nothing of its stream, for so long is dropped, and its request with it."""

Number = TypeVar("Number", int, float)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = get_logger(__name__)


class OpenAiApi:
    """Routes of one conductor's HTTP port."""

    def __init__(self, conductor: Conductor, tenants: TenantDirectory, *, max_body_bytes: int) -> None:
        self._conductor = conductor
        self._tenants = tenants
        self._max_body_bytes = max_body_bytes
        self._health = HealthServer(conductor.metrics.registry, conductor.not_ready)
        self._created = int(time.time())
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None
        self._is_leaving = False

    async def start(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Listen, with TLS if `tls` has a certificate; returns the port. Raises: OSError when the port is taken."""
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._errors_as_json])
        app.add_routes(
            [
                *self._health.routes(),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._chat_completions),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{model:.+}", self._model),
                web.get("/v1/timelines/{request_id}", self._timeline),
                web.get("/health", self._health_check),
                web.get("/version", self._version),
            ]
        )
        app.on_response_prepare.append(self._close_when_leaving)
        # A client that goes away cancels its handler, and the handler its request on every node.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, host, port, ssl_context=tls.http_server() if tls else None)
        await self._site.start()
        return int(self._runner.addresses[0][1])

    @property
    def num_connections(self) -> int:
        """Of clients, those that send nothing at the moment too."""
        server = self._runner.server if self._runner is not None else None
        return len(server.connections) if server is not None else 0

    async def leave(self, timeout_s: float) -> None:
        """Take no new connection, and close each open one with the next answer on it; return when none is left, or after `timeout_s`.

        A client that finds its connection closed just when it has sent a request may not send it again.
        """
        self._is_leaving = True
        assert self._site is not None
        await self._site.stop()
        give_up_s = time.monotonic() + timeout_s
        while self.num_connections and time.monotonic() < give_up_s:
            await asyncio.sleep(LEAVE_POLL_S)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _close_when_leaving(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self._is_leaving:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        tenant = self._tenant(http)
        text = await _body(http)
        arrival_s = self._conductor.clock.now()
        body = await parse_completion(text)
        self._check_model(body)
        params = body.params(max_tokens=body.max_tokens, logprobs=body.logprobs)
        submission = _submission(http, tenant, completion_prompt(body.prompt), params, arrival_s)
        shape = CompletionShape(self._conductor.tokenizer, with_logprobs=body.logprobs is not None)
        return await self._answer(http, body, submission, shape)

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        tenant = self._tenant(http)
        text = await _body(http)
        arrival_s = self._conductor.clock.now()
        body = parse(ChatBody, text)
        self._check_model(body)
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        prompt = ChatPrompt(messages=[chat_message(message) for message in body.messages])
        params = body.params(max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None)
        submission = _submission(http, tenant, prompt, params, arrival_s)
        shape = ChatShape(self._conductor.tokenizer, with_logprobs=bool(body.logprobs))
        return await self._answer(http, body, submission, shape)

    async def _answer(self, http: web.Request, body: Body, submission: Submission, shape: Shape) -> web.StreamResponse:
        async with aclosing(self._conductor.generate(submission)) as deltas:
            if body.stream:
                return await self._stream(http, body, submission.request_id, deltas, shape)
            received = [delta async for delta in deltas]
        answer = {
            **self._head(shape.object_name, shape.id_prefix, submission.request_id),
            "choices": [shape.whole(received)],
            "usage": usage_json(received[-1].usage),
        }
        return web.json_response(answer, headers={REQUEST_ID_HEADER: submission.request_id})

    async def _stream(
        self,
        http: web.Request,
        body: Body,
        request_id: RequestId,
        deltas: AsyncIterator[OutputDelta],
        shape: Shape,
    ) -> web.StreamResponse:
        first = await anext(deltas)
        head = self._head(shape.chunk_object_name, shape.id_prefix, request_id)
        chunks = ChunkWriter(shape, head, include_usage=body.include_usage, continuous_usage=body.continuous_usage)
        async with _EventStream(http, request_id) as events:
            await events.send(chunks.opening(first.usage) + chunks.chunk(first))
            usage = first.usage
            try:
                async for delta in deltas:
                    usage = delta.usage
                    if event := chunks.chunk(delta):
                        await events.send(event)
            except MoontideError as error:
                await events.send(sse_event(error_json(error)))
            else:
                await events.send(chunks.closing(usage))
            return await events.end()

    def _tenant(self, http: web.Request) -> Tenant:
        """Asked before the body is read. Raises: Unauthorized."""
        return self._tenants.of(http.headers.get("Authorization", ""))

    def _check_model(self, body: Body) -> None:
        if body.model is not None and body.model != self._conductor.model.name:
            raise _unknown_model(body.model, self._conductor.model.name)

    def _head(self, object_name: str, id_prefix: str, request_id: RequestId) -> dict[str, Any]:
        return {
            "id": f"{id_prefix}{request_id}",
            "object": object_name,
            "created": int(time.time()),
            "model": self._conductor.model.name,
        }

    async def _models(self, _http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name != self._conductor.model.name:
            raise _unknown_model(name, self._conductor.model.name)
        return web.json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        model = self._conductor.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "moontide",
            "max_model_len": model.max_context,
        }

    async def _timeline(self, http: web.Request) -> web.Response:
        request_id = http.match_info["request_id"]
        timeline = self._conductor.timeline(_without_prefix(request_id))
        if timeline is None:
            return _json_error(404, f"request {request_id!r} is not known here (any more)", "NotFoundError")
        return web.json_response(asdict(timeline))

    async def _health_check(self, _http: web.Request) -> web.Response:
        reason = self._conductor.not_ready()
        return web.Response(text="ok\n") if reason is None else web.Response(status=503, text=f"{reason}\n")

    async def _version(self, _http: web.Request) -> web.Response:
        return web.json_response({"version": version("moontide")})

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost edge: every error leaves as the JSON that OpenAI clients read."""
        try:
            return await handler(request)
        except ConnectionError:
            # The client is gone and nobody reads this; without a response the library would log a traceback.
            return web.Response(status=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            response = self._error_response(request, error)
        if (request_id := request.headers.get(REQUEST_ID_HEADER)) is not None:
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    def _error_response(self, request: web.Request, error: Exception) -> web.Response:
        match error:
            case MoontideError():
                return web.json_response(error_json(error), status=error.http_code, headers=_error_headers(error))
            case web.HTTPRequestEntityTooLarge():
                limit = f"{self._max_body_bytes} bytes (conductor.max_body_bytes)"
                return _json_error(413, f"the body is larger than {limit}", "BadRequest")
            case web.RequestPayloadError():
                reason = f"the body cannot be read: {error}; send all of it, plain or with a right Content-Encoding"
                return _json_error(400, reason, "BadRequest")
            case web.HTTPException():
                kind = "NotFoundError" if error.status == 404 else "BadRequest"
                return _json_error(error.status, f"{request.method} {request.path}: {error.reason}", kind)
            case _:
                log.exception("http handler failed", path=request.path)
                internal = Internal(f"{type(error).__name__}: {error}")
                return web.json_response(error_json(internal), status=internal.http_code)


class _EventStream:
    """Server-sent events to one client. A client that reads nothing for CLIENT_STALL_S loses its connection, which cancels the handler."""

    def __init__(self, http: web.Request, request_id: RequestId) -> None:
        self._http = http
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                REQUEST_ID_HEADER: request_id,
            }
        )
        self._loop = asyncio.get_running_loop()
        self._writing_since_s = math.inf

    async def __aenter__(self) -> Self:
        await self._response.prepare(self._http)
        self._watch()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watcher.cancel()

    async def send(self, data: bytes) -> None:
        """Raises: ConnectionError when the client is gone."""
        if data:
            self._writing_since_s = self._loop.time()
            await self._response.write(data)
            self._writing_since_s = math.inf

    async def end(self) -> web.StreamResponse:
        await self.send(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    def _watch(self) -> None:
        """One timer for the whole stream: a timeout around each write would cost more than the write."""
        if self._loop.time() - self._writing_since_s >= CLIENT_STALL_S and self._http.transport is not None:
            log.info("client dropped: it read nothing", seconds=CLIENT_STALL_S, path=self._http.path)
            self._http.transport.abort()
        self._watcher = self._loop.call_later(CLIENT_STALL_S / 2, self._watch)


async def _body(http: web.Request) -> bytes:
    """Raises: HTTPRequestTimeout when the client stalls; HTTPRequestEntityTooLarge."""
    loop = asyncio.get_running_loop()
    body = bytearray()
    try:
        async with asyncio.timeout(CLIENT_STALL_S) as stall:
            async for chunk in http.content.iter_any():
                body += chunk
                if len(body) > http.client_max_size:
                    raise web.HTTPRequestEntityTooLarge(http.client_max_size, len(body))
                stall.reschedule(loop.time() + CLIENT_STALL_S)
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"nothing more of the body came for {CLIENT_STALL_S} s") from error
    return bytes(body)


def _submission(
    http: web.Request, tenant: Tenant, prompt: Prompt, params: GenerateParams, arrival_s: float
) -> Submission:
    """The body's content on the terms of the headers. Raises: BadRequest."""
    wishes = Wishes(
        ttft_slo_s=_number(http, TTFT_SLO_HEADER, float),
        tbt_slo_s=_number(http, TBT_SLO_HEADER, float),
        priority=_number(http, PRIORITY_HEADER, int),
    )
    return Submission(
        request_id=check_request_id(http.headers.get(REQUEST_ID_HEADER, "")),
        prompt=prompt,
        params=params,
        arrival_s=arrival_s,
        tenant=tenant,
        slo=wishes.slo(tenant),
        priority=wishes.priority_of(tenant),
        idempotency_key=http.headers.get(IDEMPOTENCY_HEADER, ""),
    )


def _number(http: web.Request, header: str, kind: type[Number]) -> Number | None:
    text = http.headers.get(header)
    if text is None:
        return None
    try:
        return kind(text)
    except ValueError as error:
        raise BadRequest(f"header {header}: {text[:40]!r} is no number", param=header) from error


def _error_headers(error: MoontideError) -> dict[str, str]:
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if error.http_code not in (429, 503):
        return {}
    retry_after_s = (error.retry_after_s if isinstance(error, Rejected) else None) or 0.0
    return {"Retry-After": str(max(RETRY_AFTER_S, math.ceil(retry_after_s)))}


def error_json(error: MoontideError) -> dict[str, Any]:
    param = error.param if isinstance(error, BadRequest) else None
    kind = "NotFoundError" if isinstance(error, ModelNotFound) else error.code
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.http_code}}


def _json_error(status: int, message: str, kind: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


def _unknown_model(asked: str, served: str) -> ModelNotFound:
    return ModelNotFound(f"model {asked[:200]!r} is not served here; ask for {served!r}", param="model")


def _without_prefix(answer_id: str) -> str:
    """The request id in the `id` of an answer; a bare request id stays as it is."""
    for prefix in (CompletionShape.id_prefix, ChatShape.id_prefix):
        if answer_id.startswith(prefix):
            return answer_id.removeprefix(prefix)
    return answer_id
