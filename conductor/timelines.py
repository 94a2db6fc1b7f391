"""What a conductor remembers of its latest requests: spans, parts of the TTFT, how they ended."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from moontide.clock import Clock
from moontide.timeline import Span, Timeline, TtftParts

MAX_REMEMBERED = 512


class RequestRecord:
    """The growing timeline of one request. Ends in exactly one outcome."""

    def __init__(self, request_id: str, *, arrival_s: float, clock: Clock) -> None:
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.outcome = ""
        self.ttft_parts: TtftParts | None = None
        self.handoff_s = 0.0
        self.plan = ""
        self._clock = clock
        self._spans: list[Span] = []
        self._end_s: float | None = None

    def add(self, name: str, start_s: float, end_s: float, *, track: str = "conductor", num_tokens: int = 0) -> None:
        """A span seen by the conductor itself, in its clock's time."""
        self._spans.append(
            Span(
                name=name,
                track=track,
                start_s=start_s - self.arrival_s,
                duration_s=end_s - start_s,
                num_tokens=num_tokens,
            )
        )

    def add_remote(self, spans: Iterable[Span], *, origin_s: float) -> None:
        """Spans of another host, relative to the moment that is `origin_s` on the conductor's clock."""
        self._spans.extend(span.shifted(origin_s - self.arrival_s) for span in spans)

    def end(self, outcome: str) -> None:
        assert not self.outcome, f"{self.request_id} ended twice: {self.outcome}, then {outcome}"
        self.outcome = outcome
        self._end_s = self._clock.now()

    def timeline(self) -> Timeline:
        end_s = self._clock.now() if self._end_s is None else self._end_s
        return Timeline(
            request_id=self.request_id,
            spans=tuple(sorted(self._spans, key=lambda span: span.start_s)),
            duration_s=end_s - self.arrival_s,
            outcome=self.outcome,
            ttft_parts=self.ttft_parts,
            handoff_s=self.handoff_s,
            plan=self.plan,
        )


class TimelineRing:
    """The latest requests by id; the oldest goes first."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max = max_remembered
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def put(self, record: RequestRecord) -> None:
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        while len(self._records) > self._max:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Timeline | None:
        record = self._records.get(request_id)
        return None if record is None else record.timeline()
