"""What Mooncake's master says over HTTP: the only questions to it that grant no lease."""

import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.transfer.base import StoreUnavailable

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Segment:
    """Memory of one host in the pool."""

    name: str
    endpoint: str
    """host:port where the engine of its owner introduces itself."""


def query_segments(master_http: str) -> list[Segment]:
    """The segments of all hosts, as far as the master knows. Raises: StoreUnavailable."""
    answer = _get_json(master_http, "/get_segments_detail")
    try:
        return [Segment(each["segment_name"], each["te_endpoint"]) for each in answer["segments"]]
    except (KeyError, TypeError) as error:
        raise _unusable(master_http, error) from error


def find_segment(master_http: str, name: str) -> Segment:
    """Raises: StoreUnavailable, also when there is none of that name."""
    for segment in query_segments(master_http):
        if segment.name == name:
            return segment
    raise StoreUnavailable(f"the store master at {master_http} lists no segment {name}")


def query_places(master_http: str, keys: Sequence[str]) -> list[frozenset[str]]:
    """Endpoints of the segments that hold each object; none for one that cannot be read. Raises: StoreUnavailable."""
    answer = _get_json(master_http, "/batch_query_keys?keys=" + ",".join(keys))
    try:
        found = [answer["data"][key] for key in keys]
        return [
            frozenset(copy["transport_endpoint_"] for copy in each["values"]) if each["ok"] else frozenset()
            for each in found
        ]
    except (KeyError, TypeError) as error:
        raise _unusable(master_http, error) from error


def http_get(master_http: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    """Raises: StoreUnavailable when nobody answers in time."""
    connection = http.client.HTTPConnection(master_http, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        raise StoreUnavailable(f"the store master at {master_http} does not answer: {error}") from error
    finally:
        connection.close()


def _get_json(master_http: str, path: str) -> Any:
    status, body = http_get(master_http, path, timeout_s=_TIMEOUT_S)
    try:
        if status != 200:
            raise ValueError(f"status {status}")
        return json.loads(body)
    except ValueError as error:
        raise _unusable(master_http, error) from error


def _unusable(master_http: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"the store master at {master_http} gave no usable answer: {error!r}")
