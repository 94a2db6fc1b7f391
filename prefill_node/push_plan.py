"""Whether a step's K/V goes into the store layer group by layer group or at its end, from measured times (pure; no threads, no clock).

    compute       | g0 | g1 | g2 | g3 |
    layer-wise         | put g0 | put g1 g2 | put g3 |        what waits when a call begins goes with it
    at the end                        | put g0 g1 g2 g3    |

Layer-wise hides puts behind the compute of later groups and takes more calls. Why this rule: docs/decisions/008-push.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_LEAST_SAMPLES = 16
_LEAST_PAIRS = 32
_VARIED = 2.0
"""Two calls tell the parts of their time apart when one has so many times the bytes of the other."""


@dataclass(frozen=True, kw_only=True)
class PutCost:
    """How long a put call takes."""

    call_s: float
    """Seconds of every call, however small."""
    byte_s: float
    """Seconds per byte."""

    def time_s(self, nbytes: float, *, num_calls: int = 1) -> float:
        return num_calls * self.call_s + nbytes * self.byte_s


@dataclass(frozen=True)
class PutSample:
    """A call that stored everything."""

    nbytes: int
    time_s: float


def fit_put_cost(samples: Sequence[PutSample]) -> PutCost | None:
    """The line through the samples by medians, so that some slow calls move it little; None while they cannot tell its parts apart.

    Source: the Theil-Sen estimator, over the pairs of calls that differ in size.
    """
    if len(samples) < _LEAST_SAMPLES:
        return None
    nbytes = np.array([sample.nbytes for sample in samples], dtype=np.float64)
    times_s = np.array([sample.time_s for sample in samples])
    small, large = np.nonzero(nbytes[None, :] >= _VARIED * nbytes[:, None])
    if len(small) < _LEAST_PAIRS:
        return None
    slopes = (times_s[large] - times_s[small]) / (nbytes[large] - nbytes[small])
    byte_s = max(0.0, float(np.median(slopes)))
    return PutCost(call_s=max(0.0, float(np.median(times_s - byte_s * nbytes))), byte_s=byte_s)


def pushes_layer_wise(
    cost: PutCost, *, num_groups: int, group_bytes: float, step_s: float, max_call_bytes: int
) -> bool:
    """Whether putting the layer groups one by one hides at least as much time as its further calls take.

    Args:
        group_bytes: of all blocks of the step in one layer group.
        step_s: what the step takes to compute.
        max_call_bytes: most bytes of one call.
    """

    def num_calls(groups: int) -> int:
        return max(1, math.ceil(groups * group_bytes / max_call_bytes))

    end_calls = num_calls(num_groups)
    end_s = step_s + cost.time_s(num_groups * group_bytes, num_calls=end_calls)
    free_s, done, calls = 0.0, 0, 0
    while done < num_groups:
        start_s = max(free_s, step_s * (done + 1) / num_groups)
        computed = num_groups if start_s >= step_s else int(start_s * num_groups / step_s)
        groups = max(1, computed - done)
        calls += num_calls(groups)
        free_s = start_s + cost.time_s(groups * group_bytes, num_calls=num_calls(groups))
        done += groups
    hidden_s = end_s - free_s
    return hidden_s >= (calls - end_calls) * cost.call_s
