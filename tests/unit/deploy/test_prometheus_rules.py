"""What can be checked of rules, tests and runbooks without Prometheus; `make check-deploy` has promtool for the rest."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from conductor.config import ConductorConfig
from decode_node.config import DecodeNodeConfig
from deploy.config import ClusterConfig
from deploy.grafana.declared import Metric, declared_metrics
from deploy.prometheus.rules import (
    DEFAULT_SLOS,
    RULES_FILE,
    RUNBOOKS,
    Alert,
    Times,
    WrongOption,
    groups,
    main,
    parse,
    render,
    rule_file,
    seconds_of,
    slos_of,
)
from kvstore.config import KvStoreConfig
from prefill_node.config import PrefillNodeConfig

ROOT = Path(__file__).resolve().parents[3]
PAGES = ROOT / RUNBOOKS
HEADINGS = ["Symptom", "What it means", "Look at", "Do", "Verify", "Staged"]
PACKAGES = ("moontide", "kvstore", "prefill_node", "decode_node", "conductor")
SCRAPED = {"namespace", "instance", "component"}
"""Labels that a scrape adds."""
UNITS = r"(?:ms|[smhd])"

_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_GROUPING = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")
_SERIES = re.compile(r"(?:conductor|prefill|decode|kvstore)_[a-z0-9_]+|moontide:[a-z0-9_:]+|up")


@functools.cache
def rules() -> list[dict[str, Any]]:
    return [rule for group in rule_file(DEFAULT_SLOS)["groups"] for rule in group["rules"]]


@functools.cache
def alerts() -> list[Alert]:
    return [rule for group in groups(DEFAULT_SLOS) for rule in group.rules if isinstance(rule, Alert)]


def selectors(expr: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(metric, matchers) of every series that an expression names."""
    for name, matchers in _SELECTOR.findall(_GROUPING.sub(" ", expr)):
        if _SERIES.fullmatch(name):
            yield name, dict(_MATCHER.findall(matchers))


@functools.cache
def metrics() -> dict[str, Metric]:
    return declared_metrics(ROOT)


@functools.cache
def sources() -> str:
    """Everything that the services are written in."""
    return "\n".join(path.read_text() for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


@functools.cache
def recorded() -> dict[str, set[str]]:
    """Recorded series -> the labels that its rules give or keep."""
    found: dict[str, set[str]] = {}
    for rule in rules():
        if "record" in rule:
            kept = {label.strip() for labels in _GROUPING.findall(rule["expr"]) for label in labels.split(",")}
            found.setdefault(rule["record"], set()).update(kept, rule.get("labels", {}))
    return found


def pages() -> list[Path]:
    return sorted(path for path in PAGES.glob("*.md") if path.name != "README.md")


def test_the_checked_in_rules_are_what_the_program_writes() -> None:
    assert RULES_FILE.read_text() == render(rule_file(DEFAULT_SLOS)), "run `make rules`"
    assert yaml.safe_load(RULES_FILE.read_text()) == rule_file(DEFAULT_SLOS)


def test_every_series_and_label_of_a_rule_exists() -> None:
    declared, own = metrics(), recorded()
    for rule in rules():
        found = list(selectors(rule["expr"]))
        assert found or rule["expr"].startswith("vector("), rule
        for name, matchers in found:
            if name == "up":
                labels = SCRAPED
            elif name in own:
                labels = own[name]
            else:
                assert name in declared, f"{name} of {rule} is declared nowhere"
                labels = declared[name].labels | SCRAPED | ({"le"} if name.endswith("_bucket") else set())
            assert set(matchers) <= labels, f"{name} has no label of {matchers}"


def test_metrics_of_rules_are_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for rule in rules():
        for name, _ in selectors(rule["expr"]):
            if name != "up" and not name.startswith("moontide:"):
                assert f"`{re.sub('_(bucket|count|sum)$', '', name)}`" in text, name


def test_what_is_selected_by_value_can_happen() -> None:
    """Values that matchers name are those that the code counts."""
    text = sources()
    for rule in rules():
        for name, matchers in selectors(rule["expr"]):
            for label, value in matchers.items():
                if label not in {"le", "slo", "component"}:
                    for each in value.split("|"):
                        assert re.search(rf'["\s({{:,]{re.escape(each)}["\s,.;:()]', text), (name, label, each)


def test_alerts_are_complete_and_have_a_page() -> None:
    names = [alert.name for alert in alerts()]
    assert len(names) == len(set(names))
    for rule in rules():
        if "alert" in rule:
            assert re.fullmatch(r"Moontide[A-Z]\w+", rule["alert"])
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert rule["labels"]["owner"] in {"serving", "platform"}
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
            assert (ROOT / rule["annotations"]["runbook_url"]).is_file()
    assert {path.stem for path in pages()} == set(names)
    index = (PAGES / "README.md").read_text()
    for alert in alerts():
        assert f"| [{alert.name}]({alert.name}.md) | {alert.severity} | {alert.owner} |" in index


def test_every_alert_is_tested_to_fire_and_to_be_silent() -> None:
    cases = [
        case
        for path in sorted((RULES_FILE.parent / "tests").glob("*.yaml"))
        for case in yaml.safe_load(path.read_text())["tests"]
    ]
    for alert in alerts():
        expectations = [
            [each["exp_samples"] for each in case["promql_expr_test"]]
            for case in cases
            if f'alertname="{alert.name}"' in str([each["exp_samples"] for each in case["promql_expr_test"]])
        ]
        assert expectations, f"no test expects {alert.name}"
        assert any([] in each for each in expectations), f"no test of {alert.name} has a time without alerts"


def test_inhibitions_are_about_alerts_that_exist() -> None:
    names = {alert.name for alert in alerts()}
    config = yaml.safe_load((RULES_FILE.parent / "alertmanager.yaml").read_text())
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            wanted = re.fullmatch(r'alertname=~?"(.+)"', matcher)
            if wanted and wanted[1] != "Moontide.*":
                matching = {name for name in names if re.fullmatch(wanted[1], name)}
                assert len(matching) >= wanted[1].count("|") + 1, matcher
    table = (RULES_FILE.parent / "README.md").read_text().partition("## Quiet while the cause is known")[2]
    assert set(re.findall(r"Moontide[A-Z]\w+", table)) <= names


def test_unit_tests_evaluate_groups_in_the_order_of_the_file() -> None:
    """promtool's own order is random, so alerts would now and then miss what is recorded at the same moment."""
    order = [group.name for group in groups(DEFAULT_SLOS)]
    for path in (RULES_FILE.parent / "tests").glob("*.yaml"):
        assert yaml.safe_load(path.read_text())["group_eval_order"] == order, path.name


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_runbook_says_what_to_do(page: Path) -> None:
    text = page.read_text()
    alert = next(alert for alert in alerts() if alert.name == page.stem)
    assert text.startswith(f"# {alert.name}\n\nSeverity: {alert.severity}. Owner: {alert.owner}.\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.stem)
def test_runbook_names_what_exists(page: Path) -> None:
    text = page.read_text()
    declared, own = metrics(), recorded()
    for code in re.findall(r"`([^`]+)`", text):
        if code.startswith("moontide "):
            assert code.split()[1] in {"status", "timeline", "explain", "generate", "role"}, code
        elif "python -m kvstore" in code:
            assert code.split()[3] in {"stats", "ls", "verify", "evict"}, code
        for name, _ in selectors(code):
            # Names may stand for the histogram itself.
            assert name == "up" or name in own or any(f"{name}{end}" in declared for end in ("", "_bucket")), name
        setting = re.fullmatch(
            r"(conductor|prefill|decode|kvstore|deploy|registry|kv|node|store)\.(\w+)(?:=\S+)?", code
        )
        if setting:
            assert setting[2] in settings(setting[1]), code
    for message in re.findall(r"log line\s+`([^`]+)`", text, re.IGNORECASE):
        assert f'"{message}"' in sources(), message


@functools.cache
def settings(section: str) -> set[str]:
    """Names of the settings of a section of any service."""
    found: set[str] = set()
    for cls in (ClusterConfig, ConductorConfig, KvStoreConfig, PrefillNodeConfig, DecodeNodeConfig):
        hint = get_type_hints(cls).get(section)
        if dataclasses.is_dataclass(hint):
            found |= {each.name for each in dataclasses.fields(hint)}
    return found


def test_a_scaled_file_differs_in_durations_alone() -> None:
    production, staged = (render(rule_file(DEFAULT_SLOS, window_scale=scale)) for scale in (1.0, 0.02))
    durations = re.compile(rf"(?<=\[)\d+{UNITS}(?=\])|(?<=for: )\d+{UNITS}|(?<=interval: )\d+{UNITS}")
    assert durations.sub("", production) == durations.sub("", staged)
    before, after = durations.findall(production), durations.findall(staged)
    assert len(before) == len(after)
    for one, other in zip(before, after, strict=True):
        assert other == Times(0.02).of(one) or (other == "1s" and seconds_of(one) * 0.02 < 1), (one, other)


@pytest.mark.parametrize(
    ("scale", "duration", "written"),
    [
        (1, "90m", "90m"),
        (1, "1h", "1h"),
        (0.02, "1h", "72s"),
        (0.02, "5m", "6s"),
        (0.01, "30s", "300ms"),
        (0.5, "1d", "12h"),
    ],
)
def test_durations_are_written_in_one_unit(scale: float, duration: str, written: str) -> None:
    assert Times(scale).of(duration) == written


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ttft-slo-s", "3"], "nearest: 2.5"),
        (["--tbt-slo-s", "0.1"], "no bound of a bucket"),
        (["--ttft-objective", "0.9"], "never fire"),
        (["--tbt-objective", "1"], "between 0 and 1"),
    ],
)
def test_slos_that_cannot_be_counted_are_refused(options: list[str], says: str) -> None:
    with pytest.raises(WrongOption, match=re.escape(says)):
        slos_of(parse(options))


@pytest.mark.parametrize("scale", ["0", "2", "-1", "1e-9"])
def test_a_scale_that_makes_no_windows_is_refused(scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--window-scale", scale]) == 2
    assert "--window-scale" in capsys.readouterr().err


def test_options_reach_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ttft-slo-s", "2.5", "--ttft-objective", "0.99", "--runbook-base", "https://runbooks.example/"]) == 0
    text = capsys.readouterr().out
    assert 'conductor_ttft_seconds_bucket{le="2.5"}' in text
    assert "14.4 * 0.01" in text
    assert "runbook_url: https://runbooks.example/MoontideNoDecode.md" in text


@pytest.mark.parametrize("path", sorted(RULES_FILE.parent.rglob("*.yaml")), ids=lambda path: path.name)
def test_every_yaml_file_parses(path: Path) -> None:
    assert yaml.safe_load(path.read_text())
