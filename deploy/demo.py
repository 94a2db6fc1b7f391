"""`moontide demo`: a long real document through a fresh cluster, and what happened to it, explained.

The document is made of Python's own language reference (`pydoc_data.topics`, PSF licence), which comes with every Python.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer

from deploy.cli import INTERRUPTED, Answer, print_timeline, run_cluster, stream_answer
from deploy.config import ClusterConfig
from deploy.console import Console
from deploy.gantt import pipeline_sentence, stage_chunks, ttft_table
from deploy.local import LocalCluster
from deploy.model import prepare_model
from moontide.client import ChatTurn, GenerateOptions, MoontideClient
from moontide.errors import Internal
from moontide.timeline import Timeline

DOCUMENT_TOKENS = 6_050
DOCUMENT_TOPICS = ("debugger", "assert", "exceptions", "try", "raise", "with")
"""Chapters that belong together, so that even a small model can say what they are about."""
QUESTION = "What is this text about?"
SECOND_QUESTION = "Summarize the text above in two sentences."
SMALL_PRINT = "(a model of 135 million parameters: look at how the answer came about rather than at its wisdom)"
PARAMS = GenerateOptions(max_tokens=64, temperature=0.0)
TIMELINE_TRIES = 50
STOP_POLL_S = 0.1


def run_demo(config: ClusterConfig, console: Console) -> int:
    """Returns 0 when the answer came, the parts of its TTFT are known and everything has stopped, INTERRUPTED after a signal."""
    console.step(f"model {config.model.name}: preparing")
    model = prepare_model(config)
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    document = build_document(lambda text: len(tokenizer.encode(text).ids))
    cluster = LocalCluster(config, model_dir=model.path, model_id=model.model_id, say=console.step)
    console.step(
        f"starting a cluster of {len(cluster.plan.processes)} processes on loopback: {config.deploy.stages} prefill stages, "
        f"{config.deploy.decode} decode instance, conductor, KV store, registry"
    )

    def serve(stop: threading.Event) -> int:
        return asyncio.run(unless_stopped(stop, _ask(cluster, document, console)))

    code = run_cluster(cluster, console, serve)
    console.step("everything has stopped")
    return code


async def unless_stopped(stop: threading.Event, work: Coroutine[Any, Any, None]) -> int:
    """Returns 0 when `work` is done, INTERRUPTED when `stop` was set before, which cancels it. Raises: what it raises."""
    task = asyncio.ensure_future(work)
    while not task.done() and not stop.is_set():
        await asyncio.wait([task], timeout=STOP_POLL_S)
    task.cancel()
    await asyncio.wait([task])
    if task.cancelled():
        return INTERRUPTED
    task.result()
    return 0


def build_document(count_tokens: Callable[[str], int], *, num_tokens: int = DOCUMENT_TOKENS) -> str:
    """Chapters about errors and debugging, then the others by name, cut at the paragraph that reaches `num_tokens` tokens."""
    parts: list[str] = []
    total = 0
    chosen = [name for name in DOCUMENT_TOPICS if name in topics]
    for name in [*chosen, *sorted(topics.keys() - set(chosen))]:
        for paragraph in f"# {name}\n\n{topics[name]}".split("\n\n"):
            parts.append(paragraph)
            total += count_tokens(paragraph)
            if total >= num_tokens:
                return "\n\n".join(parts)
    return "\n\n".join(parts)


async def _ask(cluster: LocalCluster, document: str, console: Console) -> None:
    async with MoontideClient(cluster.grpc_address, tls=cluster.config.tls) as client:
        console.step("the cluster serves; sending the document with a question")
        console.heading(f"Q: {QUESTION}")
        first = await stream_answer(client, _prompt(document, QUESTION), PARAMS)
        found = await _timeline(client, first.request_id)
        print(SMALL_PRINT)
        console.heading("Where the time to the first token went")
        if first.parts is not None:
            print(ttft_table(first.parts, client_ttft_s=first.client_ttft_s))
        console.heading(
            "What every part did, over time (the shades are its chunks in turn, numbered where there is room)"
        )
        print_timeline(found, console, with_parts=False)

        console.heading(f"Q: {SECOND_QUESTION}   (same document)")
        second = await stream_answer(client, _prompt(document, SECOND_QUESTION), PARAMS)
        console.heading("What this showed")
        for line in findings(first, found, second):
            print(f"  - {line}")
        print(flush=True)


def findings(first: Answer, found: Timeline, second: Answer) -> list[str]:
    """What the run proved, in sentences with its numbers."""
    lines = []
    stages = stage_chunks(found)
    if stages:
        lines.append(
            f"A prompt of {first.usage.prompt_tokens} tokens went through {len(stages)} stage processes in {len(stages[0])} chunks."
        )
    sentence = pipeline_sentence(found)
    if sentence is not None:
        lines.append(sentence)
    lines.append(
        f"Its K/V went from the stages into the store and from there into the decode instance, which made the other "
        f"{max(0, first.usage.completion_tokens - 1)} tokens of the answer."
    )
    if first.parts is not None and second.parts is not None:
        lines.append(
            f"The second question found {second.usage.cached_tokens} of its {second.usage.prompt_tokens} tokens in the cache: "
            f"first token after {second.parts.ttft_s:.2f} s instead of {first.parts.ttft_s:.2f} s."
        )
    return lines


async def _timeline(client: MoontideClient, request_id: str) -> Timeline:
    """Once its last spans have arrived, which may be a moment after the last token. Raises: Internal when the conductor lost it."""
    found = None
    for _ in range(TIMELINE_TRIES):
        found = await client.timeline(request_id)
        if found is not None and found.outcome:
            break
        await asyncio.sleep(0.05)
    if found is None:
        raise Internal(f"the conductor does not know request {request_id}, which it has just answered")
    return found


def _prompt(document: str, question: str) -> list[ChatTurn]:
    return [ChatTurn(role="user", content=f"{document}\n\n{question}")]
