"""The dashboards drawn from a real Prometheus: a cluster under load, a burst, and a decode instance that dies.

MOONTIDE_PICTURES=DIR keeps the pictures there (those of docs/dashboards.md: docs/images); MOONTIDE_PICTURE_SECONDS: length of the load.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.paced_models import write_paced_model
from deploy.grafana.draw import draw
from deploy.grafana.queries import load_dashboards, panels
from tests.cluster import RunningCluster, running_cluster
from tests.deploy.live.load import FrontDoor, MixedLoad, Sizes, in_background
from tests.deploy.live.prometheus import SCRAPE_INTERVAL_S, running_prometheus

SECONDS = float(os.environ.get("MOONTIDE_PICTURE_SECONDS", "75"))
BURST_AT, BURST_END, KILL_AT = 0.35, 0.6, 0.75
"""Shares of that time."""
BOUNDS = {"ttft_slo": "2.5", "tbt_slo": "0.08"}
"""That a burst breaks."""
RATE_INTERVAL = f"{10 * SCRAPE_INTERVAL_S}s"
MOST_BYTES = 150_000
SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    folder: Path
    empty: dict[str, list[str]]
    """Panels without data of each dashboard."""


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drawn]:
    folder = tmp_path_factory.mktemp("dashboards")
    pictures = Path(os.environ.get("MOONTIDE_PICTURES", folder / "pictures"))
    model = write_paced_model(
        folder, max_context=16_384, head_dim=64, overhead_s=2e-3, token_s=1e-4, pair_s=1e-9, decode_step_s=0.01
    )
    settings = [
        *model.settings_for(2),
        "deploy.hosts=2",
        "kv.block_tokens=64",
        "prefill.num_pages=1024",
        "prefill.chunk_tokens=512",
        "decode.num_pages=1024",
        "decode.local_prefill_tokens=256",
        f"kvstore.pool_bytes={256 << 20}",
        f"kvstore.ssd_dir={folder / 'ssd'}",
        f"kvstore.ssd_bytes={512 << 20}",
        "conductor.release_queue_s=0.5",
    ]
    with (
        running_cluster(model=model.directory, decode=2, prefill_groups=2, settings=settings) as cluster,
        running_prometheus(cluster, folder) as prometheus,
    ):
        end_s = show_something(cluster)
        empty = draw(
            f"http://{prometheus.address}",
            pictures,
            minutes=SECONDS / 60,
            rate_interval=RATE_INTERVAL,
            values=BOUNDS,
            end_s=end_s,
        )
        yield Drawn(folder=pictures, empty=empty)


def show_something(cluster: RunningCluster) -> float:
    """Usual load, a burst in the middle of it, and a decode instance that dies and starts again. Returns when that was over (unix time)."""
    door = FrontDoor(urls=[f"http://{cluster.http_address}"], model=served_model(cluster.http_address))
    started_s = time.monotonic()

    def until(share: float) -> None:
        time.sleep(max(0.0, started_s + share * SECONDS - time.monotonic()))

    with in_background(MixedLoad(door, pause_s=1.5)):
        until(BURST_AT)
        with in_background(MixedLoad(door, sizes=Sizes(long=8000), seed=1, pause_s=0.1)):
            until(BURST_END)
        until(KILL_AT)
        cluster.kill("decode-0")
        until(1.0)
        return time.time()


def served_model(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10.0) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def test_every_panel_has_data(drawn: Drawn) -> None:
    assert {name: titles for name, titles in drawn.empty.items() if titles} == {}


@pytest.mark.parametrize("name", load_dashboards())
def test_picture_holds_every_panel_and_is_small(name: str, drawn: Drawn) -> None:
    path = drawn.folder / f"{name}.svg"
    texts = {element.text for element in ElementTree.parse(path).iter(f"{SVG}text")}
    titles = {panel["title"] for panel in panels(load_dashboards()[name]) if "$" not in panel["title"]}
    assert titles <= texts
    assert path.stat().st_size < MOST_BYTES
