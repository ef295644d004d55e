"""The law of what Fleetcast writes: text that a user or a sender chose never leaves its place.

One test a protocol: it writes hostile text and reads the result back by that protocol's own rules.
"""

import asyncio
import csv
import io
import json
import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from fleetcast.cli.demo.screen import DemoScreen
from fleetcast.cli.kit import screen
from fleetcast.cli.kit.logs import Format, LineFormatter
from fleetcast.cli.main import app
from fleetcast.clients.grpc_stubs import externalscaler_pb2 as scaler
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.ingest.inbox.job_events import check_event
from fleetcast.models.risk.node_events import make_event_signals
from fleetcast.models.risk.node_risk import score_nodes
from fleetcast.service.adapter_records import AdapterAuditLine, AdapterRecords
from fleetcast.service.answers.queues import ChargeRow, Charges
from fleetcast.service.api.broadcaster import EventBroadcaster
from fleetcast.service.api.telemetry import format_pipeline_page, merge_pages
from fleetcast.service.board.board import BoardWriter, Section, encode_names
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.exposition import Page
from fleetcast.service.placer.queue_answers import format_charges_csv
from tests.fuzz.bounds import examples
from tests.service.adapters_world import PORT, World
from tests.service.grpc_world import KEDA, GrpcWorld, grpc_world, ref, refusal, within

NOW_MS = 1_760_000_000_000
CONSOLE = Path(__file__).parents[2] / "service" / "console"
HOSTILE = (
    *("\n", "\r", "\r\n", "\t", "\0", "\x0b", "\x0c", "\x1b[2J", "\x1b]52;c;\x07", "\x7f", "\x85", "\x9b31m"),
    *(
        "\u061c",
        "\u200b",
        "\u202e",
        "\u2028",
        "\u2029",
        "\ud800",
        "\ufeff",
        "\U000e0041",
        '"',
        "\\",
        "'",
        ",",
        ";",
        "|",
    ),
    *("=cmd", "+1", "-1", "@SUM", "＝1", "{", "}", "#", "<script>", "&", "$x_{", "[red]", "[/]", "%0a", "data: x", "é"),
)
TEXTS = st.lists(st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=6).map("".join)
NAMES = TEXTS.map(lambda text: "".join(filter(str.isprintable, text)) or "a")  # what events and requests may be called


def is_one_plain_line(text: str) -> bool:
    return text.isprintable()


@examples(250)
@given(TEXTS, st.sampled_from(list(Format)), st.booleans())
@example("\x9b31m", Format.TEXT, False)
@example("\u202e", Format.TEXT, False)
def test_one_call_of_a_logger_is_one_line_that_steers_no_terminal(text: str, form: Format, fails: bool) -> None:
    error = ValueError(text)
    info = (ValueError, error, None) if fails else None
    record = logging.LogRecord("service", logging.INFO, "x.py", 1, "job %s ended", (text,), info)
    assert is_one_plain_line(LineFormatter(form, "api").format(record))


@examples(250)
@given(TEXTS)
def test_a_line_of_a_command_is_one_line_that_steers_no_terminal(text: str) -> None:
    said = printed(lambda: screen.echo(f"node {text}"))
    assert said.endswith("\n")
    assert is_one_plain_line(said[:-1])


@examples(250)
@given(st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_a_document_of_a_command_stays_the_same_document(document: dict[str, str]) -> None:
    said = printed(lambda: screen.echo_text(json.dumps(document, ensure_ascii=False, indent=1)))
    assert json.loads(said) == document
    assert said.replace("\n", "").isprintable()


def printed(act: Any) -> str:
    with pytest.MonkeyPatch.context() as patch:
        out = io.StringIO()
        patch.setattr("sys.stdout", out)
        act()
    return out.getvalue()


def test_what_an_adapter_was_told_steers_no_terminal(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    row = f'{{use = "band_file", mode = "write", options = {{path = "{tmp_path / "bands"}"}}}}'
    config.write_text(f'state = "{tmp_path / "var"}"\n[adapters]\nadapter = [{row}]\n')
    why = "checker: ok\n2026-01-01 00:00:00 UTC  done      n9 band: high -> low \x1b[2J\x9b31m"
    line = AdapterAuditLine(
        **{"time_ms": NOW_MS, "decision": "d", "adapter": "band_file", "mode": "write", "board": 1, "key": "n1"},
        **{"field": "band", "seen": None, "value": "high", "why": why, "outcome": "done"},
    )
    AdapterRecords(tmp_path / "var").append_lines([line])
    lines = CliRunner().invoke(app, ["adapters", "show", "band_file", "--config", str(config)]).output.split("\n")
    assert not [one for one in lines if not one.isprintable()]
    assert len([one for one in lines if " done " in one and one.startswith("20")]) == 1


def test_the_report_of_a_demo_shows_the_words_of_a_visitor_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = {"kind": "ib_flap", "node": "n1", "gpu": None, "port": 0, "visible": True, "start_ms": 0, "detected_ms": 1}
    report = {"faults": [fault | {"reason": "guest: [/] [red]hot \x1b[2J"}], "false_nodes": [], "worth": None}
    out = io.StringIO()
    monkeypatch.setattr("sys.stderr", out)
    DemoScreen(1).print_report(report, ["a problem [/b]"])
    assert "guest: [/] [red]hot \\u001b[2J" in out.getvalue()
    assert "a problem [/b]" in out.getvalue()


@examples(200)
@given(message=TEXTS, advice=TEXTS, kind=st.sampled_from(("health", "drain")))
def test_the_sentence_of_a_flag_is_one_plain_line_whatever_a_checker_says(message: str, advice: str, kind: str) -> None:
    given: dict[str, Any] = {"severity": "fatal", "check": "fan", "advice": advice} if kind == "health" else {}
    event = NodeEvent(node="n1", source="nhc", sequence=1, time_ms=NOW_MS - 60_000, type=kind, message=message, **given)  # type: ignore[arg-type]
    check_event(event, NOW_MS)
    table = NodeTable()
    table.apply(event)
    risk = score_nodes(make_event_signals(table.nodes, {"n1": 0}, {}, NOW_MS), np.array([True]), NOW_MS, None)
    said = [row.sentence for row in risk.reasons[0]] + [risk.actions[0].sentence]
    assert all(map(is_one_plain_line, said))


def test_the_reason_of_a_write_is_one_plain_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reason = "GPU 3:\nname: other \x1b[2J"
    world.step(0.9, 0.0)
    assert all(write.why.isprintable() for batch in PORT.batches for write in batch)
    assert all(line.why.isprintable() for line in world.host.records.read_newest_lines("memory", 9))


@examples(250)
@given(st.dictionaries(NAMES | TEXTS.filter(lambda text: "\ud800" not in text), st.integers(0, 9), max_size=4))
@example({"a\u2028b": 1})
@example({"a\rb": 1, "a b": 2})
def test_every_label_value_comes_back_from_the_exposition(values: dict[str, int]) -> None:
    page = Page()
    page.add_gauge("own_gpus", "GPUs.", [({"job": name}, value) for name, value in values.items()])
    rows = [{"name": name, "kind": "plugin", "bad": value} for name, value in values.items()]
    merged = merge_pages(format_pipeline_page({"sources": rows, "bad_records": values}, 1.0, 1), page.encode().decode())
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(merged):
        for sample in family.samples:
            (label,) = [sample.labels[key] for key in ("job", "source", "reason") if key in sample.labels] or [""]
            found.setdefault(sample.name, {})[label] = sample.value
    assert found.get("fleetcast_own_gpus", {}) == values
    assert found.get("fleetcast_source_bad_records_total", {}) == values
    assert found.get("fleetcast_bad_records_total", {}) == values


@examples(250)
@given(st.lists(NAMES, max_size=4), st.sampled_from(",;\t"))
@example(["a;=cmd"], ";")
@example(["＝1"], ",")
def test_no_name_becomes_a_formula_of_a_spreadsheet(names: list[str], separator: str) -> None:
    rows = [ChargeRow(name, 1, 2.0, 0.0, None, None, 0.0, 0.0) for name in names]
    text = format_charges_csv(Charges(NOW_MS, 0, NOW_MS, "user", rows))
    cells = [cell for row in csv.reader(io.StringIO(text), delimiter=separator) for cell in row]
    assert not [cell for cell in cells if cell[:1] in tuple("=+-@＝＋－＠\t\r")]
    read = [row["user"] for row in csv.DictReader(io.StringIO(text))]
    assert [one.removeprefix("'") for one in read] == [name.removeprefix("'") for name in names]


@examples(200)
@given(st.lists(TEXTS, max_size=5))
@example(["a\nb", "c"])
@example([""])
def test_no_name_moves_the_others_in_a_section_of_names(names: list[str]) -> None:
    section = encode_names(names)
    found = section.decode().split("\n") if section else [""] * len(names)
    assert len(found) == len(names)
    assert [one for one, name in zip(found, names, strict=True) if one != name and name.isprintable()] == []


@examples(100)
@given(st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), min_size=1, max_size=3))
def test_one_event_of_a_stream_is_one_event(rows: list[dict[str, str]]) -> None:
    rows = [{key: value for key, value in row.items() if "\ud800" not in key + value} for row in rows]
    text = asyncio.run(streamed(rows)).decode()
    parts = [part for part in re.split(r"\r\n\r\n|\n\n|\r\r", text) if part]
    assert len(parts) == 1
    event, data = re.split(r"\r\n|\n|\r", parts[0])
    assert event == "event: hard"
    assert json.loads(data.removeprefix("data: ")) == [row for at, row in enumerate(rows) if row not in rows[:at]]


async def streamed(rows: list[dict[str, str]]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = BoardWriter(Path(folder))
        writer.publish([Section("x", b"1", 1)], 1)
        stream = EventBroadcaster(BoardCache(Path(folder), hold_s=0.0), poll_s=0.001)
        events = stream.stream_events()
        await anext(events)
        await anext(events)
        writer.publish_urgent([Section("doc.urgent", json.dumps({"rows": unique(rows)}).encode(), 2)], 2)
        found = await asyncio.wait_for(anext(events), 20)
        await events.aclose()
        await stream.close()
        return found


def unique(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for at, row in enumerate(rows) if row not in rows[:at]]


def test_a_refusal_by_grpc_keeps_its_status_whatever_name_it_quotes(tmp_path: Path) -> None:
    async def play(world: GrpcWorld) -> None:
        world.publish(20.0)
        for sign in ("\n", "名", "\U0001f4a5"):
            asked = scaler.GetMetricsRequest(scaledObjectRef=ref(target=sign * 3000), metricName=sign * 3000)
            code, why = await refusal(world.call(f"{KEDA}GetMetrics", asked))
            assert (code.name, why != "") == ("INVALID_ARGUMENT", True)

    async def run() -> None:
        async with grpc_world(tmp_path) as world:
            await within(play(world))

    asyncio.run(run())


def test_a_name_in_a_plot_is_text_and_no_formula() -> None:
    from fleetcast.training.reports.plots import draw_calibration

    svg = draw_calibration({"$x_{$": [(0.5, 0.4)], "a$b$": [(0.5, 0.5)]}, "$\\frac{$ <script>")
    assert "$x_{$" in svg
    assert "<script>" not in svg


def test_the_console_takes_data_as_text_alone() -> None:
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|\beval\(|new Function|DOMParser|javascript:"
    found = [(path.name, hit) for path in CONSOLE.glob("*.js") for hit in re.findall(sinks, path.read_text())]
    assert found == []
