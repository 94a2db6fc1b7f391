"""A GroupSession on a fake clock, with stages whose reports the test makes up."""

from __future__ import annotations

import itertools

import numpy as np
from prometheus_client import CollectorRegistry

from kvstore.block import BlockHash, hash_blocks
from kvstore.pool import RequestKey
from moontide.fair_share import Share
from moontide.perf_model import StepModel, StepShape
from moontide.sampling_params import SamplingParams
from moontide_proto.v1 import common_pb2, stage_pb2
from prefill_node.config import PrefillConfig
from prefill_node.metrics import GroupMetrics
from prefill_node.prompt import Prompt
from prefill_node.session import GroupSession
from tests.fakes.clock import FakeClock

BLOCK_TOKENS = 4
ROOT = BlockHash(b"r" * 32)
NOBODY = Share(tenant="")


MODEL = StepModel(overhead_s=0.001, token_s=0.01, pair_s=0.0)


class World:
    """One stage whose reports the test makes up, or several."""

    def __init__(
        self,
        *,
        num_stages: int = 1,
        num_pages: int = 64,
        mode: str = "cpp",
        policy: str = "srpt",
        model: StepModel | None = None,
        push: str = "auto",
        chunk_tokens: int = 8,
    ) -> None:
        self.clock = FakeClock()
        self.entries: list[stage_pb2.LogEntry] = []
        self.registry = CollectorRegistry()
        self.session = GroupSession(
            epoch=1,
            config=PrefillConfig(
                group_id="g",
                stage_idx=0,
                num_stages=num_stages,
                control_address="127.0.0.1:1",
                chunk_tokens=chunk_tokens,
                chunking="fixed" if model is None else "equal-time",
                mode=mode,
                policy=policy,
                push=push,
            ),
            num_pages=num_pages,
            block_tokens=BLOCK_TOKENS,
            step_models=[model] * num_stages,
            send=self.entries.append,
            clock=self.clock,
            metrics=GroupMetrics(self.registry, num_stages=num_stages),
        )
        self._orders = itertools.count()

    def waiting(self, request_id: str, num_tokens: int, *, seed: int = 0, share: Share = NOBODY) -> Prompt:
        """A prompt without pages; prompts of one seed share their prefix."""
        token_ids = np.arange(num_tokens, dtype=np.uint32) + 1000 * seed
        prompt = Prompt(
            key=RequestKey(request_id, 1),
            order=next(self._orders),
            token_ids=token_ids,
            root=ROOT,
            block_hashes=hash_blocks(token_ids, block_tokens=BLOCK_TOKENS, root=ROOT),
            block_tokens=BLOCK_TOKENS,
            sampling=SamplingParams(max_tokens=1),
            output_idx=0,
            arrived_s=self.clock.now(),
            ttft_slo_s=None,
            share=share,
        )
        self.session.arrive(prompt)
        return prompt

    def prompt(self, request_id: str, num_tokens: int, *, hit_blocks: int = 0, seed: int = 0) -> Prompt:
        prompt = self.waiting(request_id, num_tokens, seed=seed)
        self.session.take_pages(prompt, hit_blocks=hit_blocks)
        return prompt

    @property
    def sent(self) -> list[tuple[int, int]]:
        """(first token, number of tokens) of every chunk in the log that the test has not taken."""
        chunks = (chunk for entry in self.entries for chunk in entry.compute.chunks)
        return [(chunk.first_token, chunk.num_tokens) for chunk in chunks]

    def report(self, *, stage_idx: int = 0, **report: object) -> None:
        self.session.on_report(stage_idx, stage_pb2.StageReport(epoch=1, **report))  # type: ignore[arg-type]

    def work(self, *, step_s: float = 0.0, token_s: float = 0.0) -> None:
        """Do everything that the log asks for and was not done yet; a step takes `step_s` and `token_s` for each token."""
        while self.entries:
            entry = self.entries.pop(0)
            if entry.HasField("compute"):
                compute_s = step_s + token_s * sum(chunk.num_tokens for chunk in entry.compute.chunks)
                self.clock.advance(compute_s)
                tokens = [common_pb2.Token(token_id=7) for chunk in entry.compute.chunks if chunk.is_last]
                self.report(step_done=stage_pb2.StepDone(seq=entry.seq, compute_s=compute_s, tokens=tokens))
                self.report(puts_done=stage_pb2.PutsDone(seq=entry.seq))
            elif entry.HasField("end"):
                self.report(end_done=stage_pb2.EndDone(request_id=entry.end.request_id, request_epoch=1))

    def step(self) -> list[str]:
        """Compute the next step of the log, in the time that the model says, and end what has to end; returns the prompts that are done."""
        entry = self.entries.pop(0)
        while not entry.HasField("compute"):
            self.report(end_done=stage_pb2.EndDone(request_id=entry.end.request_id, request_epoch=1))
            if not self.entries:
                return []
            entry = self.entries.pop(0)
        chunks = entry.compute.chunks
        compute_s = MODEL.time_s(StepShape.of_chunks((chunk.num_tokens, chunk.first_token) for chunk in chunks))
        self.clock.advance(compute_s)
        done = [chunk.request_id for chunk in chunks if chunk.is_last]
        tokens = [common_pb2.Token(token_id=7) for _ in done]
        self.report(step_done=stage_pb2.StepDone(seq=entry.seq, compute_s=compute_s, tokens=tokens))
        self.report(puts_done=stage_pb2.PutsDone(seq=entry.seq))
        return done

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0
