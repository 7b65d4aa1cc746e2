"""The dashboard for Grafana names only metrics and labels that are exported."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import msgspec

from boltmesh.tui.export.exposition import Family
from boltmesh.tui.export.prometheus import families, prometheus_text
from tests.tui.exposition import parse
from tests.tui.samples import crashed_demo, demo

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
METRIC = re.compile(r"(boltmesh_\w+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)=")


UNITS = {
    "_ratio": "percentunit",
    "_per_second": "short",
    "_seconds": "s",
    "_watts": "watt",
    "_celsius": "celsius",
    "_bytes_total": "bytes",
    "_bytes": "bytes",
    "_metric": "none",
    "_finding": "none",
    "_alert": "none",
}
"""Units of Grafana by the end of a metric's name, which has its base unit."""


def _dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return document


def _labels(family: Family) -> set[str]:
    return {label for labels, _ in family.samples for label in labels} | {"exported_job"}


def test_each_query_names_exported_metrics_and_their_labels() -> None:
    known = {family.name: family for family in families(demo())}
    queries = [
        (target["expr"], target["legendFormat"])
        for panel in _dashboard()["panels"]
        for target in panel["targets"]
    ]
    assert len(queries) > 10
    for query, legend in queries:
        found = METRIC.findall(query)
        assert found, query
        for name, selector in found:
            assert name in known, query
            assert set(LABEL.findall(selector)) <= _labels(known[name]), query
            used = set(re.findall(r"\{\{(\w+)\}\}", legend))
            used |= set(re.findall(r"\w+", "".join(re.findall(r"by \(([^)]*)\)", query))))
            assert used <= _labels(known[name]), query


def test_each_panel_has_the_unit_of_its_metrics() -> None:
    for panel in _dashboard()["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            units = {
                next(unit for end, unit in UNITS.items() if name.endswith(end))
                for name, _ in METRIC.findall(query)
            }
            (unit,) = units
            if "rate(" in query:
                unit = {"bytes": "Bps"}[unit]
            if " / " in query:
                unit = "percentunit"
            assert panel["fieldConfig"]["defaults"]["unit"] == unit, panel["title"]


def test_the_run_is_chosen_from_the_exported_jobs() -> None:
    known = {family.name: family for family in families(demo())}
    (run,) = [each for each in _dashboard()["templating"]["list"] if each["name"] == "run"]
    query = re.fullmatch(r"label_values\((\w+), (\w+)\)", run["query"]["query"])
    assert query is not None
    assert query[1] in known
    assert query[2] in _labels(known[query[1]])


def test_each_panel_has_a_place_and_a_number_of_its_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for left, right in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        is_beside = left["x"] + left["w"] <= right["x"] or right["x"] + right["w"] <= left["x"]
        is_below = left["y"] + left["h"] <= right["y"] or right["y"] + right["h"] <= left["y"]
        assert is_beside or is_below


def test_alerts_are_exported_while_their_condition_holds() -> None:
    healthy = parse(prometheus_text(demo()))["boltmesh_job_alert"]
    assert set(healthy.samples.values()) == {0}
    assert parse(prometheus_text(crashed_demo()))["boltmesh_job_alert"].value(kind="failed") == 1
    stalled = msgspec.structs.replace(demo(), time=demo().time + 1000)
    assert parse(prometheus_text(stalled))["boltmesh_job_alert"].value(kind="stall") == 1
