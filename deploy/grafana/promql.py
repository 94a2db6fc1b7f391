"""The few shapes of PromQL that the dashboards are made of (pure).

Every selector names the variable `namespace`, and `instance` where a board is about the processes of one role. Both match
everything by default, a missing label too, so the boards also serve a Prometheus outside of Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass

RATE_INTERVAL = "$__rate_interval"
CLUSTER = 'namespace=~"$namespace"'
PROCESS = CLUSTER + ',instance=~"$instance"'


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What of the cluster the queries of a board look at."""

    matchers: str = CLUSTER

    def select(self, metric: str, extra: str = "") -> str:
        return f"{metric}{{{self.matchers}{',' if extra else ''}{extra}}}"

    def rate(self, counter: str, extra: str = "", window: str = RATE_INTERVAL) -> str:
        """Per second, one series per process and label set."""
        return f"rate({self.select(counter, extra)}[{window}])"

    def total_rate(self, counter: str, by: str = "", extra: str = "", window: str = RATE_INTERVAL) -> str:
        """Per second, of all processes together, or per label `by`."""
        return f"sum{_by(by)} ({self.rate(counter, extra, window)})"

    def total(self, gauge: str, by: str = "") -> str:
        return f"sum{_by(by)} ({self.select(gauge)})"

    def quantile(self, share: float, histogram: str, by: str = "") -> str:
        """Of a histogram of all processes together, or per label `by`."""
        labels = f"le, {by}" if by else "le"
        return f"histogram_quantile({share}, sum by ({labels}) ({self.rate(histogram + '_bucket')}))"

    def mean(self, histogram: str, by: str = "") -> str:
        return f"{self.total_rate(histogram + '_sum', by)} / {self.total_rate(histogram + '_count', by)}"

    def buckets(self, histogram: str) -> str:
        """Observations per second of each bucket: what a heatmap draws."""
        return self.total_rate(histogram + "_bucket", "le")

    def share_within(self, histogram: str, bound: str, window: str = RATE_INTERVAL) -> str:
        """Share of the observations that were at most `bound`, which must be the border of a bucket."""
        within = self.total_rate(histogram + "_bucket", extra=f'le="{bound}"', window=window)
        return f"{within} / {self.total_rate(histogram + '_count', window=window)}"

    def burn_rate(self, histogram: str, bound: str, objective: str, window: str) -> str:
        """How many times faster than the objective allows observations miss the bound; 1 spends the budget exactly."""
        return f"(1 - {self.share_within(histogram, bound, window)}) / (1 - {objective})"


def optional(expr: str) -> str:
    """0 where nothing is there: for a part that may be switched off, and for label values that may never come."""
    return f"({expr}) or vector(0)"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
