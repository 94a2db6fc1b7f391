"""Load: who may come, by what the node has to do and what its running requests bear; and what it says of that in the registry."""

from __future__ import annotations

from collections.abc import Mapping

from decode_node.batch import Batch, Phase
from decode_node.config import DecodeConfig
from decode_node.request import Request
from decode_node.session import OpenRequest
from decode_node.step_plan import PromptPart
from decode_node.step_times import Decoding, StepTimes
from kvstore.pool import RequestKey
from moontide.errors import Declined


class Load:
    """Looks at the requests of a node and changes nothing."""

    def __init__(
        self, requests: Mapping[RequestKey, Request], batch: Batch, times: StepTimes, config: DecodeConfig
    ) -> None:
        self._requests = requests
        self._batch = batch
        self._times = times
        self._config = config

    def check_open(self, wanted: OpenRequest, num_pages: int) -> None:
        """Raises: Declined if others would suffer, or if a prompt could not be computed here at once."""
        prompt = None
        if wanted.local_prefill is not None:
            prompt = PromptPart(0, len(wanted.token_ids))
            self._check_room(num_pages)
        self._times.check(self._admitted(), Decoding(len(wanted.token_ids), wanted.tbt_slo_s), prompt=prompt)

    def check_start(self, request: Request) -> None:
        """The second look, before the first block is pulled or, without any, before the prompt is computed.

        Raises: Declined.
        """
        local = request.local
        if local is not None and self._room_tokens() < 0:
            raise Declined(
                f"{local.num_left} tokens of the prompt are no prefix hit, which with other prompts is more than "
                f"decode.local_prefill_tokens={self._config.local_prefill_tokens}; choose a prefill group"
            )
        prompt = local.part if local is not None else None
        self._times.check(self._admitted(apart_from=request), request.decoding, prompt=prompt)

    def prefill_s(self, request: Request, local_part: PromptPart) -> float:
        """How long its prompt will take to compute; 0 while nothing predicts."""
        return self._times.prefill_s([local_part], self._admitted(apart_from=request))

    def report(self) -> dict[str, float]:
        """What the registry record says."""
        batch = self._batch
        prompts = [r.local.part for r in self._requests.values() if r.local is not None and r.local.num_left]
        running = [r.decoding for r in self._requests.values() if self._is_decoding(r)]
        return {
            "waiting": float(batch.count(Phase.WAITING_PAGES)),
            "pulling": float(batch.count(Phase.PULLING, Phase.READY)),
            "running": float(batch.count(Phase.RUNNING)),
            "free_pages": float(batch.num_free_pages),
            "num_pages": float(batch.num_pages),
            "max_batch": float(self._config.max_batch),
            "context_tokens": float(sum(each.context_tokens for each in running)),
            "queued_prefill_s": self._times.prefill_s(prompts, running),
            "chunk_tokens": float(self._config.chunk_tokens),
            "prefill_room_tokens": float(max(0, self._room_tokens())),
            **self._times.report(),
        }

    def _check_room(self, num_pages: int) -> None:
        limit, max_batch = self._config.local_prefill_tokens, self._config.max_batch
        if self._room_tokens() < 1:
            raise Declined(
                f"decode.local_prefill_tokens={limit} leaves no room for another prompt; choose a prefill group"
            )
        num_admitted = len(self._admitted())
        if num_admitted >= max_batch or not self._batch.has_room_for(num_pages):
            raise Declined(
                f"the prompt would wait here: {num_admitted} requests of decode.max_batch={max_batch} run and "
                f"{self._batch.num_free_pages} pages are free; choose a prefill group"
            )

    def _room_tokens(self) -> int:
        """Tokens of further prompts that may be computed here now; below 0 if a hit was shorter than it seemed."""
        num_left = sum(request.local.num_left for request in self._requests.values() if request.local is not None)
        return self._config.local_prefill_tokens - num_left

    def _admitted(self, *, apart_from: Request | None = None) -> list[Decoding]:
        """The requests that run, or will as soon as their K/V is there."""
        return [each.decoding for each in self._requests.values() if each.is_admitted and each is not apart_from]

    def _is_decoding(self, request: Request) -> bool:
        """Whether it gets a token from every step."""
        entry = self._batch.find(request.key)
        is_prompt = request.local is not None and request.local.num_left > 0
        return entry is not None and entry.phase is Phase.RUNNING and not is_prompt
