"""The way of the K/V from prefill to decode: is it hidden behind compute, is it there when decode wants to start, how fast is it?

bandwidth   put and get of block-sized batches through our client, beside the store's library, its transfer engine and a TCP socket
            (kv_bandwidth.py)
layerwise   prompts of 2k to 128k tokens on two paced stages, pushed into the store of another host over a link whose rate makes the
            transfer take 60 % of the compute. Pushed layer by layer behind the compute, and all at once after it
handoff     from the end of the last chunk to the start of decode's first step, where decode pulls from another host over TCP

    near host: conductor, two stages, data client without a segment ==== link ==== far host: master, store with the segment, decode

Hosts are two network namespaces joined by a link of known rate (layerwise; needs root), or loopback twice (handoff). With --netns the
link has 1 Gb/s and a round trip of 10 ms in both parts, and the result stands beside what a model of the link predicts.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from harness import CpuWatch, cluster, machine, noise, print_result, timeline_of
from kv_bandwidth import LARGE_KIB, SizeResult, measure
from line_chart import Chart
from paced_models import NUM_LAYERS, VOCAB_SIZE, PacedModel, write_paced_model
from two_hosts import LOOPBACK, Host, TwoHostCluster, enter, far_host

from deploy.gantt import stage_chunks
from deploy.local import LocalCluster
from kvstore.data_client import ENGINE_SETTINGS
from moontide.client import GenerateOptions, MoontideClient
from moontide.perf_model import StepModel, StepShape, makespan_s
from moontide.timeline import Timeline
from tests.netns import ShapedLink, shaped_link

NODE = StepModel(overhead_s=0.001, token_s=0.0004, pair_s=0.0)
"""The whole model on one node. Without a cost per pair of tokens compute is linear, and so is the link's load at every length."""
STAGES = 2
HEAD_DIM = 32
BLOCK_TOKENS = 256
CHUNK_TOKENS = 256
KV_BYTES_PER_TOKEN = NUM_LAYERS * 2 * HEAD_DIM * 2
"""K and V, one head, bfloat16."""
LENGTHS = tuple(1024 * k for k in (2, 4, 8, 16, 32, 64, 128))
RUNS = {2048: 3, 4096: 3, 8192: 3, 16384: 2}
"""Prompts of a length per cluster; one of a longer one."""
ROUNDS = 2
LONG_TOKENS = 65536
"""Prompts from here on take long, and only the first round has them."""
PUSHES = ("layer-wise", "after-prefill")
SERIAL_SHARE = 0.6
"""Transfer over the shaped link, of the compute."""
VALID_SHARE = 0.5
"""With less the link does not work as the run supposes."""
HANDOFF_LENGTHS = (2048, 8192, 32768)
HANDOFF_RUNS = 7
OBJECT_KIB = (48, 192, 768, 4096)
BANDWIDTH_ROUNDS = 12
NETNS_BITS_S, NETNS_RTT_S = 1e9, 0.010
FAST_BITS_S = 10e9
"""The link while a cluster starts."""
SEAL_ROUND_TRIPS = 3
"""Connect and ask whether the objects exist, then the seal."""
CALL_OBJECTS, LANES = 256, int(ENGINE_SETTINGS["MC_TCP_LANES_PER_PEER"])
"""Objects of a call, and how many of them travel at once: each on a connection of its own, until the other side has confirmed it."""
HANDOFF_ROUND_TRIPS = 3
"""Half a one for the word that the blocks are sealed, one to ask where they are, one for their bytes, and half a one by which the
conductor takes decode's moments for later than they were."""


@dataclass(frozen=True)
class Hosts:
    near: Host
    far: Host
    link: ShapedLink | None
    """None: both are this machine's loopback."""


@dataclass(frozen=True)
class Push:
    """One prompt, in seconds after its arrival."""

    computed_s: float
    """The last chunk leaves the last stage."""
    stored_s: float
    """The conductor knows that every block is sealed."""
    first_step_s: float
    """Decode's first step starts."""

    @classmethod
    def of(cls, timeline: Timeline) -> Push:
        starts = {span.name: span.start_s for span in timeline.spans}
        return cls(
            computed_s=max(span.end_s for spans in stage_chunks(timeline) for span in spans),
            stored_s=starts["handoff"],
            first_step_s=starts["first step"],
        )


@dataclass
class Pushes:
    """Runs by way of pushing and length."""

    runs: dict[str, dict[int, list[Push]]] = field(default_factory=lambda: {push: {} for push in PUSHES})

    def compute_s(self, length: int) -> float:
        """Prefill alone: from arrival to the last chunk's end, where nothing is pushed meanwhile."""
        return median(run.computed_s for run in self.runs["after-prefill"][length])

    def overhead(self, push: str, length: int) -> float:
        """What storing adds to prefill, as a share of prefill alone."""
        return median(run.stored_s for run in self.runs[push][length]) / self.compute_s(length) - 1


async def ask(client: MoontideClient, prompt: Sequence[int]) -> Push:
    """Send one prompt and read its timeline. Raises: MoontideError; AssertionError if the cache answered a part of it."""
    request_id = ""
    options = GenerateOptions(max_tokens=2, temperature=0.0)
    async for chunk in client.generate(prompt, params=options):
        request_id = chunk.request_id
        if chunk.usage is not None:
            assert chunk.usage.cached_tokens == 0, f"{chunk.usage.cached_tokens} tokens came from the cache"
    return Push.of(await timeline_of(client, request_id))


def compute_alone_s(length: int) -> float:
    """Makespan of the chunks on the paced stages."""
    steps = [StepShape.of_chunk(CHUNK_TOKENS, start) for start in range(0, length, CHUNK_TOKENS)]
    stage = dataclasses.replace(NODE, token_s=NODE.token_s / STAGES, pair_s=NODE.pair_s / STAGES)
    return makespan_s(steps, [stage] * STAGES)


def shaped_bits_s(length: int) -> float:
    """The link's rate at which the K/V of a prompt takes SERIAL_SHARE of its compute."""
    return 8 * KV_BYTES_PER_TOKEN * length / (SERIAL_SHARE * compute_alone_s(length))


def predicted_overhead(push: str, length: int, *, bits_s: float, rtt_s: float) -> float:
    """What a model of the link says: every stage has one sender, which puts all that is ready.

    A call begins and ends with a round trip to the master. Between them its objects take the time of their bytes and a round trip
    for every LANES of them, on connections that both stages share. Computing never waits.
    """
    compute_s = compute_alone_s(length)
    step_s = NODE.overhead_s + CHUNK_TOKENS * NODE.token_s / STAGES
    groups = NUM_LAYERS // STAGES
    objects_per_group = CHUNK_TOKENS // BLOCK_TOKENS
    object_wire_s = 8 * BLOCK_TOKENS * KV_BYTES_PER_TOKEN / NUM_LAYERS / bits_s
    num_chunks = length // CHUNK_TOKENS
    ready = {
        stage: [
            compute_s if push == "after-prefill" else (stage + chunk + (group + 1) / groups) * step_s
            for chunk in range(num_chunks)
            for group in range(groups)
        ]
        for stage in range(STAGES)
    }
    free_s = dict.fromkeys(range(STAGES), 0.0)
    lanes_free_s = 0.0
    while any(ready.values()):
        stage = min((each for each in ready if ready[each]), key=lambda each: max(free_s[each], ready[each][0]))
        start_s = max(free_s[stage], ready[stage][0])
        taken = min(sum(moment <= start_s for moment in ready[stage]), CALL_OBJECTS // objects_per_group)
        del ready[stage][:taken]
        num_objects = taken * objects_per_group
        sent_s = max(start_s + rtt_s, lanes_free_s)
        lanes_free_s = sent_s + num_objects * (object_wire_s + rtt_s / LANES)
        free_s[stage] = max(lanes_free_s, sent_s + num_objects * object_wire_s + rtt_s) + rtt_s
    return (max(free_s.values()) + SEAL_ROUND_TRIPS * rtt_s) / compute_s - 1


@contextmanager
def paced_cluster(model: PacedModel, hosts: Hosts, *, push: str, on_far: Sequence[str]) -> Iterator[LocalCluster]:
    settings = [
        *model.settings_for(STAGES),
        "kv.layer_group=1",
        f"kv.block_tokens={BLOCK_TOKENS}",
        "prefill.num_pages=640",
        "decode.num_pages=640",
        "prefill.chunking=fixed",
        f"prefill.chunk_tokens={CHUNK_TOKENS}",
        f"prefill.push={push}",
    ]
    launch = partial(TwoHostCluster, near=hosts.near, far=hosts.far, on_far=on_far)
    with cluster(settings, launch=launch) as running:
        yield running


def run_layerwise(model: PacedModel, hosts: Hosts, *, is_netns: bool, seed: int) -> dict[str, Any]:
    """Every length with both ways of pushing, on clusters that take turns."""
    found = Pushes()
    shares: list[float] = []
    for number in range(1 if is_netns else ROUNDS):
        for push in PUSHES if number % 2 == 0 else reversed(PUSHES):
            on_far = ("mooncake-master", "kvstore-0", "decode-0")
            with paced_cluster(model, hosts, push=push, on_far=on_far) as running:
                watch = CpuWatch()
                lengths = [length for length in LENGTHS if number == 0 or length < LONG_TOKENS]
                runs = asyncio.run(
                    _push_all(running.grpc_address, hosts, lengths, is_netns=is_netns, seed=seed + number)
                )
                shares.append(watch.others_share())
            for length, pushes in runs.items():
                found.runs[push].setdefault(length, []).extend(pushes)
                print(f"{push:14} {length:7,} tokens  {_samples(pushes)}", flush=True)
            if hosts.link is not None and not is_netns:
                hosts.link.set_rate(FAST_BITS_S)
    overheads = {push: {length: found.overhead(push, length) for length in LENGTHS} for push in PUSHES}
    serialised = overheads["after-prefill"]
    result = {
        "layerwise_others_cpu_share": round(median(shares), 3),
        "layerwise_overhead_max": round(max(overheads["layer-wise"].values()), 4),
        "layerwise_overhead": _rounded(overheads["layer-wise"]),
        "serialised_overhead": _rounded(serialised),
        "compute_alone_s": _rounded({length: found.compute_s(length) for length in LENGTHS}),
        "compute_slowed_by_push": _rounded(
            {
                length: median(run.computed_s for run in found.runs["layer-wise"][length]) / found.compute_s(length) - 1
                for length in LENGTHS
            }
        ),
    }
    if is_netns:
        result["predicted_handoff_ms"] = round(
            1000 * (HANDOFF_ROUND_TRIPS * NETNS_RTT_S + 8 * CHUNK_TOKENS * KV_BYTES_PER_TOKEN / NETNS_BITS_S), 1
        )
        result |= {
            f"predicted_{name}": _rounded(
                {n: predicted_overhead(push, n, bits_s=NETNS_BITS_S, rtt_s=NETNS_RTT_S) for n in LENGTHS}
            )
            for name, push in (("layerwise_overhead", "layer-wise"), ("serialised_overhead", "after-prefill"))
        }
    else:
        result["valid"] = min(serialised.values()) >= VALID_SHARE
        result["link_mbits_s"] = _rounded({length: shaped_bits_s(length) / 1e6 for length in LENGTHS})
    return result


async def _push_all(
    address: str, hosts: Hosts, lengths: Sequence[int], *, is_netns: bool, seed: int
) -> dict[int, list[Push]]:
    source = random.Random(seed)
    runs: dict[int, list[Push]] = {}
    async with MoontideClient(address) as client:
        await ask(client, _prompt(source, LENGTHS[0]))
        for length in lengths:
            if hosts.link is not None and not is_netns:
                hosts.link.set_rate(shaped_bits_s(length))
            runs[length] = [await ask(client, _prompt(source, length)) for _ in range(RUNS.get(length, 1))]
    return runs


def run_handoff(model: PacedModel, hosts: Hosts, *, seed: int) -> dict[str, Any]:
    """Decode alone is on the far host: the stages put into their own host's segment, decode pulls over TCP."""
    with paced_cluster(model, hosts, push="layer-wise", on_far=("decode-0",)) as running:
        watch = CpuWatch()
        runs = asyncio.run(_hand_off_all(running.grpc_address, seed=seed))
        others_share = watch.others_share()
    handoff_ms = {
        length: median(1000 * (run.first_step_s - run.computed_s) for run in pushes) for length, pushes in runs.items()
    }
    for length, pushes in runs.items():
        print(
            f"handoff {length:7,} tokens  "
            + " ".join(f"{1000 * (run.first_step_s - run.computed_s):.1f}" for run in pushes)
            + " ms",
            flush=True,
        )
    first, last = handoff_ms[HANDOFF_LENGTHS[0]], handoff_ms[HANDOFF_LENGTHS[-1]]
    return {
        "handoff_others_cpu_share": round(others_share, 3),
        "handoff_ms": _rounded(handoff_ms),
        "stored_after_compute_ms": _rounded(
            {
                length: median(1000 * (run.stored_s - run.computed_s) for run in pushes)
                for length, pushes in runs.items()
            }
        ),
        "handoff_growth_2k_32k": round(last / first - 1, 4),
        "handoff_growth_2k_32k_ms": round(last - first, 2),
    }


async def _hand_off_all(address: str, *, seed: int) -> dict[int, list[Push]]:
    """Lengths take turns; the first turn is a warm-up."""
    source = random.Random(seed)
    runs: dict[int, list[Push]] = {length: [] for length in HANDOFF_LENGTHS}
    async with MoontideClient(address) as client:
        for number in range(HANDOFF_RUNS + 1):
            for length in HANDOFF_LENGTHS:
                run = await ask(client, _prompt(source, length))
                if number:
                    runs[length].append(run)
    return runs


def run_bandwidth() -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, is_own_host in (("other_host", False), ("own_host", True)):
        found = measure(OBJECT_KIB, is_own_host=is_own_host, rounds=BANDWIDTH_ROUNDS)
        sizes = found.sizes
        for size in sizes:
            print(
                f"{name:10} {size.object_kib:5} KiB  "
                + "  ".join(f"{way} {gbits:6.2f}" for way, gbits in size.gbits.items())
                + f" Gb/s  client / store {size.client_share:.3f}",
                flush=True,
            )
        result[name] = {size.object_kib: _size_summary(size) for size in sizes}
        result[f"{name}_others_cpu_share"] = round(found.others_share, 3)
        if not is_own_host:
            result |= {
                "client_vs_engine": round(min(s.client_share for s in sizes if s.object_kib >= LARGE_KIB), 3),
                "client_vs_engine_small": round(min(s.client_share for s in sizes if s.object_kib < LARGE_KIB), 3),
                "engine_gbps": _rounded({size.object_kib: size.gbits["store"] for size in sizes}),
                "transfer_engine_gbps": _rounded({size.object_kib: size.gbits["engine"] for size in sizes}),
                "socket_gbps": _rounded({size.object_kib: size.gbits["socket"] for size in sizes}),
            }
    return result


def _size_summary(size: SizeResult) -> dict[str, Any]:
    return {
        "client_vs_store": round(size.client_share, 3),
        "put_gbps": _rounded(size.gbits_put),
        "get_gbps": _rounded(size.gbits_get),
        "put_get_gbps": _rounded(size.gbits),
    }


def _prompt(source: random.Random, length: int) -> list[int]:
    return source.choices(range(VOCAB_SIZE), k=length)


def _samples(pushes: Sequence[Push]) -> str:
    return "  ".join(f"computed {run.computed_s:.3f} stored {run.stored_s:.3f} s" for run in pushes)


def _rounded(values: dict[Any, float]) -> dict[Any, float]:
    return {key: round(value, 4) for key, value in values.items()}


def draw(result: dict[str, Any], path: Path) -> None:
    layerwise, serialised = result["layerwise_overhead"], result["serialised_overhead"]
    chart = Chart(
        title="What storing the K/V adds to prefill (paced, link: transfer = 60 % of compute)",
        x_label="tokens of the prompt",
        y_label="added to prefill alone",
        x_values=LENGTHS,
        lines={
            "pushed after prefill": [serialised[length] for length in LENGTHS],
            "pushed layer by layer": [layerwise[length] for length in LENGTHS],
        },
        marks={"5 %": 0.05},
    )
    path.write_text(chart.svg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("bandwidth", "layerwise", "handoff")
    parser.add_argument("--only", choices=parts, action="append", help="run this part; may be repeated")
    parser.add_argument("--netns", action="store_true", help="both other parts over a link of 1 Gb/s and 10 ms")
    parser.add_argument("--chart", type=Path, help="write the picture of the layerwise part (SVG) there")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.only or (parts[1:] if args.netns else parts)
    result: dict[str, Any] = {"netns": args.netns}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = write_paced_model(folder, head_dim=HEAD_DIM, **dataclasses.asdict(NODE))
        hosts = loopback = Hosts(LOOPBACK, LOOPBACK, None)
        if "layerwise" in wanted or args.netns:
            bits_s, rtt_s = (NETNS_BITS_S, NETNS_RTT_S) if args.netns else (FAST_BITS_S, 0.0)
            link = stack.enter_context(shaped_link(rate_bits_s=bits_s, delay_s=rtt_s / 2))
            # Everything below runs in this namespace; it has a loopback too.
            hosts = Hosts(enter(link.near), far_host(link.far), link)
        if "bandwidth" in wanted:
            result |= run_bandwidth()
        if "layerwise" in wanted:
            result |= run_layerwise(model, hosts, is_netns=args.netns, seed=args.seed)
            if args.chart is not None:
                draw(result, args.chart)
        if "handoff" in wanted:
            result |= run_handoff(model, hosts if args.netns else loopback, seed=args.seed)
    shares = [value for name, value in result.items() if name.endswith("_others_cpu_share")]
    print_result({**result, **noise(max(shares)), "seed": args.seed, **machine()})


if __name__ == "__main__":
    main()
