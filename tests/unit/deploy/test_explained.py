from __future__ import annotations

from deploy.explained import render_explanation
from moontide_proto.v1 import moontide_pb2


def test_choice_rivals_outcome_and_dropped_nodes_are_told() -> None:
    chosen = moontide_pb2.Candidate(
        prefill_node_id="p0",
        decode_node_id="d0",
        hit_store_node_id="s1",
        hit_tokens=320,
        copy_tokens=64,
        queue_s=0.1,
        fetch_s=0.02,
        prefill_s=1.0,
        dispatch_s=0.005,
        tbt_s=0.01,
    )
    attempt = moontide_pb2.ExplainedAttempt(
        epoch=2,
        policy="moontide",
        reason="the least delay",
        chosen=chosen,
        others=[moontide_pb2.Candidate(decode_node_id="d1")],
        dropped=[moontide_pb2.Dropped(node_id=f"p{idx}", reason="gone") for idx in range(10)],
        ttft_s=1.5,
    )
    text = render_explanation(
        moontide_pb2.Explanation(request_id="r", tenant="team", prompt_tokens=400, attempts=[attempt])
    )
    lines = [line.split() for line in text.splitlines()]
    assert lines[0][:5] == ["request", "r", "of", "tenant", "team:"]
    assert "attempt 2, policy moontide: the least delay" in text
    assert [
        "chosen",
        "p0",
        "d0",
        "320",
        "from",
        "s1",
        "64",
        "100.0",
        "20.0",
        "1000.0",
        "1125.0",
        "0.0",
        "10.0",
    ] in lines
    assert ["next", "best", "by", "decode", "d1", "none", *["0.0"] * 6] in lines
    assert ["happened", "1500.0"] in lines
    assert "left out p7: gone" in text
    assert "and 2 more" in text


def test_refusal_is_told() -> None:
    text = render_explanation(moontide_pb2.Explanation(request_id="r", refused="too late"))
    assert text.splitlines() == ["request r: 0 prompt tokens", "refused: too late"]
