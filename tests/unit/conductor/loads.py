"""Views of clusters whose nodes report given loads, for tests of what is decided from them."""

from __future__ import annotations

from collections.abc import Sequence

from conductor.cost import CostModel
from conductor.registry import Node
from conductor.view import ClusterView
from moontide.registry import NodeRecord
from tests.fakes.nodes import LAYOUT

Load = dict[str, float]


def view_of(prefill: Sequence[Load], decode: Sequence[Load], *, read_s: float = 0.0) -> ClusterView:
    """All on one host with one store process; groups are named p0, p1 ..., decode instances d0, d1 ..."""
    nodes = [
        *(_node(f"p{idx}", "prefill", load, read_s) for idx, load in enumerate(prefill)),
        *(_node(f"d{idx}", "decode", load, read_s) for idx, load in enumerate(decode)),
        _node("s", "kvstore", {}, read_s),
    ]
    view = ClusterView.build(nodes, model_id="", cost=CostModel())
    assert isinstance(view, ClusterView), view
    return view


def _node(node_id: str, role: str, load: Load, read_s: float) -> Node:
    record = NodeRecord(
        node_id=node_id,
        role=role,
        address="a:1",
        http_address="",
        boot_id="1",
        model_id="" if role == "kvstore" else "m",
        layout_json=LAYOUT.to_json(),
        host_id="h",
        load=load,
    )
    return Node(record=record, alive=True, read_s=read_s)
