"""Every error that crosses a boundary of Moontide, with its gRPC status, its HTTP code and whether another attempt may help.

MoontideError
|- BadRequest            INVALID_ARGUMENT    400   the client must change the request
|  |- ModelNotFound      NOT_FOUND           404
|  |- PromptTooLong      INVALID_ARGUMENT    400
|  `- KeyReused          ALREADY_EXISTS      409   an idempotency key that came with another request before
|- Unauthorized          UNAUTHENTICATED     401   no API key, or one that nobody has
|- ConfigError           FAILED_PRECONDITION 500   a setting is wrong: a service does not start
|  `- ModelError         FAILED_PRECONDITION 500   a model cannot be served
|- RoleRefused           FAILED_PRECONDITION 409   a node cannot serve in the other role
|- Rejected              RESOURCE_EXHAUSTED  429   refused before any work; carries a RejectReason and when to come again
|- DeadlineExceeded      DEADLINE_EXCEEDED   504
|- Cancelled             CANCELLED           499
|- NodeLost              UNAVAILABLE         503   retriable
|- NoCapacity            UNAVAILABLE         503   no node can take the request now; retriable by the client
|- Declined              UNAVAILABLE         503   a node cannot do it in time, another may; retriable
|- TransferFailed        UNAVAILABLE         503   retriable
|- BlockMissing          UNAVAILABLE         503   KV that was promised is gone: recompute; retriable
`- Internal              INTERNAL            500
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import grpc


class RejectReason(Enum):
    """Why a request was refused before any work was done for it."""

    PROMPT_EXCEEDS_POOL = "prompt_exceeds_pool"
    PROMPT_EXCEEDS_PREFILL_PAGES = "prompt_exceeds_prefill_pages"
    REQUEST_EXCEEDS_DECODE_PAGES = "request_exceeds_decode_pages"
    QUEUE_FULL = "queue_full"
    TTFT_SLO = "ttft_slo"
    TBT_SLO = "tbt_slo"
    TENANT_LIMIT = "tenant_limit"


class MoontideError(Exception):
    """Base of all errors that a client or another service may see."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    http_code: ClassVar[int] = 500
    retriable: ClassVar[bool] = False
    """Whether the conductor may try again, possibly elsewhere."""

    @property
    def code(self) -> str:
        """Name of the error on the wire."""
        return type(self).__name__


class BadRequest(MoontideError):
    """The request itself is wrong; `param` names the field, when one is to blame."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    http_code = 400

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(BadRequest):
    status = grpc.StatusCode.NOT_FOUND
    http_code = 404


class PromptTooLong(BadRequest):
    """More tokens than the model's context holds."""


class KeyReused(BadRequest):
    """An idempotency key names one request."""

    status = grpc.StatusCode.ALREADY_EXISTS
    http_code = 409


class Unauthorized(MoontideError):
    status = grpc.StatusCode.UNAUTHENTICATED
    http_code = 401


class ConfigError(MoontideError):
    """A setting is wrong; the service does not start."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class ModelError(ConfigError):
    """A model cannot be served; the message says why."""


class RoleRefused(MoontideError):
    status = grpc.StatusCode.FAILED_PRECONDITION
    http_code = 409


class Rejected(MoontideError):
    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_code = 429

    def __init__(self, message: str, *, reason: RejectReason | None = None, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: when another try is expected to be taken; None: not known."""
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class DeadlineExceeded(MoontideError):
    status = grpc.StatusCode.DEADLINE_EXCEEDED
    http_code = 504


class Cancelled(MoontideError):
    status = grpc.StatusCode.CANCELLED
    http_code = 499


class NodeLost(MoontideError):
    status = grpc.StatusCode.UNAVAILABLE
    http_code = 503
    retriable = True


class NoCapacity(MoontideError):
    status = grpc.StatusCode.UNAVAILABLE
    http_code = 503


class Declined(MoontideError):
    status = grpc.StatusCode.UNAVAILABLE
    http_code = 503
    retriable = True


class TransferFailed(MoontideError):
    status = grpc.StatusCode.UNAVAILABLE
    http_code = 503
    retriable = True


class BlockMissing(MoontideError):
    status = grpc.StatusCode.UNAVAILABLE
    http_code = 503
    retriable = True


class Internal(MoontideError):
    """A bug, or something that nobody thought of."""


def _tree(cls: type[MoontideError]) -> dict[str, type[MoontideError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found.update(_tree(child))
    return found


ERRORS_BY_CODE: dict[str, type[MoontideError]] = _tree(MoontideError)


def error_from_code(code: str, message: str) -> MoontideError:
    """The error of that wire name; an unknown name (a newer peer) becomes Internal."""
    return ERRORS_BY_CODE.get(code, Internal)(message)
