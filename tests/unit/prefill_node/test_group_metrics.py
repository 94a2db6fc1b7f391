from prometheus_client import CollectorRegistry

from prefill_node.metrics import GroupMetrics


def test_every_stage_has_its_series_from_the_start() -> None:
    registry = CollectorRegistry()
    GroupMetrics(registry, num_stages=3)
    for stage in ("0", "1", "2"):
        assert registry.get_sample_value("prefill_bubble_seconds_total", {"stage": stage}) == 0
        assert registry.get_sample_value("prefill_step_prediction_error_count", {"stage": stage}) == 0
    assert registry.get_sample_value("prefill_bubble_seconds_total", {"stage": "3"}) is None
