"""The OpenAI HTTP API: a thin adapter that turns JSON into submissions and output deltas into JSON.

The status line waits for the first token, so that an error before it has the right status; an error after it is an event of the stream.
Fields that change the answer and are not supported are refused by name; unknown fields are accepted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from aiohttp import web

from conductor.answer import OutputDelta, Usage
from conductor.openai_schema import Body, ChatBody, CompletionBody, chat_message, completion_prompt, parse
from conductor.openai_shapes import ChatShape, CompletionShape, Shape, has_logprobs
from conductor.service import Conductor
from conductor.validation import ChatPrompt, RequestId, Submission, check_request_id
from moontide.errors import BadRequest, Internal, ModelNotFound, MoontideError
from moontide.log import get_logger
from moontide.metrics import HealthServer

REQUEST_ID_HEADER = "X-Request-Id"
RETRY_AFTER_S = 1
"""What a client that was refused for lack of capacity is told to wait."""

CLIENT_CLOSED_REQUEST = 499
"""What proxies log when a client hangs up."""
CLIENT_STALL_S = 60.0
"""A client that reads nothing of its stream for so long is dropped, and its request with it."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = get_logger(__name__)


class OpenAiApi:
    """Routes of one conductor's HTTP port."""

    def __init__(self, conductor: Conductor, *, max_body_bytes: int) -> None:
        self._conductor = conductor
        self._max_body_bytes = max_body_bytes
        self._health = HealthServer(conductor.metrics.registry, conductor.not_ready)
        self._created = int(time.time())
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises: OSError when the port is taken."""
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
        # A client that goes away cancels its handler, and the handler its request on every node.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        arrival_s = self._conductor.clock.now()
        request_id = check_request_id(http.headers.get(REQUEST_ID_HEADER, ""))
        body = parse(CompletionBody, await http.read())
        self._check_model(body)
        submission = Submission(
            request_id=request_id,
            prompt=completion_prompt(body.prompt),
            params=body.params(max_tokens=body.max_tokens, logprobs=body.logprobs),
            arrival_s=arrival_s,
        )
        shape = CompletionShape(self._conductor.tokenizer, with_logprobs=body.logprobs is not None)
        return await self._answer(http, body, submission, shape)

    async def _chat_completions(self, http: web.Request) -> web.StreamResponse:
        arrival_s = self._conductor.clock.now()
        request_id = check_request_id(http.headers.get(REQUEST_ID_HEADER, ""))
        body = parse(ChatBody, await http.read())
        self._check_model(body)
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        submission = Submission(
            request_id=request_id,
            prompt=ChatPrompt(messages=[chat_message(message) for message in body.messages]),
            params=body.params(max_tokens=max_tokens, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
            arrival_s=arrival_s,
        )
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
            "usage": _usage(received[-1].usage),
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
        events = _EventStream(http, request_id)
        await events.open()
        head = self._head(shape.chunk_object_name, shape.id_prefix, request_id)
        if (opening := shape.opening()) is not None:
            await events.send(_chunk(head, body, opening, first.usage))
        usage = first.usage
        try:
            async for delta in _chain(first, deltas):
                usage = delta.usage
                if delta.text or delta.finish_reason is not None or has_logprobs(delta):
                    await events.send(_chunk(head, body, shape.chunk(delta), usage))
        except MoontideError as error:
            await events.send(error_json(error))
        else:
            if body.include_usage:
                await events.send({**head, "choices": [], "usage": _usage(usage)})
        return await events.close()

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
                headers = {"Retry-After": str(RETRY_AFTER_S)} if error.http_code in (429, 503) else None
                return web.json_response(error_json(error), status=error.http_code, headers=headers)
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
    """Server-sent events to one client."""

    def __init__(self, http: web.Request, request_id: RequestId) -> None:
        self._http = http
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                REQUEST_ID_HEADER: request_id,
            }
        )

    async def open(self) -> None:
        await self._response.prepare(self._http)

    async def send(self, value: dict[str, Any]) -> None:
        """ASCII alone: some clients end a line at U+2028 or U+0085, which JSON leaves as they are.

        Raises: ConnectionError when the client is gone or reads nothing for CLIENT_STALL_S.
        """
        await self._write(f"data: {json.dumps(value)}\n\n".encode())

    async def close(self) -> web.StreamResponse:
        await self._write(b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(CLIENT_STALL_S):
                await self._response.write(data)
        except TimeoutError as error:
            if self._http.transport is not None:
                self._http.transport.close()
            raise ConnectionError(f"the client read nothing for {CLIENT_STALL_S} s") from error


def error_json(error: MoontideError) -> dict[str, Any]:
    param = error.param if isinstance(error, BadRequest) else None
    kind = "NotFoundError" if isinstance(error, ModelNotFound) else error.code
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.http_code}}


def _json_error(status: int, message: str, kind: str) -> web.Response:
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.json_response(body, status=status)


def _unknown_model(asked: str, served: str) -> ModelNotFound:
    return ModelNotFound(f"model {asked[:200]!r} is not served here; ask for {served!r}", param="model")


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _chunk(head: dict[str, Any], body: Body, choice: dict[str, Any], usage: Usage) -> dict[str, Any]:
    """One event of a stream. With include_usage every event has the field; it is null except where usage is due."""
    chunk = {**head, "choices": [choice]}
    if body.include_usage:
        chunk["usage"] = _usage(usage) if body.continuous_usage else None
    return chunk


async def _chain(first: OutputDelta, rest: AsyncIterator[OutputDelta]) -> AsyncIterator[OutputDelta]:
    yield first
    async for delta in rest:
        yield delta


def _without_prefix(answer_id: str) -> str:
    """The request id in the `id` of an answer; a bare request id stays as it is."""
    for prefix in (CompletionShape.id_prefix, ChatShape.id_prefix):
        if answer_id.startswith(prefix):
            return answer_id.removeprefix(prefix)
    return answer_id
