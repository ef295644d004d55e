"""The event stream: one line for each new board, hard signals at once, and an end when the server stops."""

import asyncio
import json
from pathlib import Path

from fleetcast.service.api.broadcaster import EventBroadcaster
from fleetcast.service.api.placer_link import PlacerLink
from fleetcast.service.api.streams import EventStreams
from fleetcast.service.board.board import Section
from fleetcast.service.board.cache import BoardCache
from tests.service.api_world import NOW_MS, publish, sections


def hub(folder: Path) -> EventBroadcaster:
    return EventBroadcaster(BoardCache(folder / "board", hold_s=0.0), poll_s=0.002, heartbeat_s=0.05)


def test_a_client_hears_of_the_board_there_is_and_of_each_new_one(tmp_path: Path) -> None:
    async def run() -> list[bytes]:
        writer, stream = publish(tmp_path), hub(tmp_path)
        events = stream.stream_events()
        parts = [await anext(events), await anext(events)]
        writer.publish(sections(NOW_MS + 10_000), NOW_MS + 10_000)
        parts.append(await anext(events))
        await events.aclose()
        await stream.close()
        return parts

    retry, first, second = asyncio.run(run())
    assert retry.startswith(b"retry:")
    assert first == b'id: 1\nevent: board\ndata: {"as_of_ms":%d,"sequence":1}\n\n' % NOW_MS
    assert b'"sequence":2' in second


def test_hard_signals_come_once_and_only_the_new_ones(tmp_path: Path) -> None:
    def urgent(*names: str) -> list[Section]:
        rows = [{"node": name, "type": "lost"} for name in names]
        return [Section("doc.urgent", json.dumps({"as_of_ms": NOW_MS, "rows": rows}).encode(), NOW_MS)]

    async def run() -> list[bytes]:
        writer, stream = publish(tmp_path), hub(tmp_path)
        writer.publish_urgent(urgent("n001"), NOW_MS)
        events = stream.stream_events()
        parts = [await anext(events), await anext(events)]
        writer.publish_urgent(urgent("n001", "n002"), NOW_MS + 1)
        parts.append(await anext(events))
        parts.append(await anext(events))
        await events.aclose()
        await stream.close()
        return parts

    *_, hard, quiet = asyncio.run(run())
    assert hard.startswith(b"event: hard\n")
    assert json.loads(hard.split(b"data: ")[1]) == [{"node": "n002", "type": "lost"}]
    assert quiet == b": heartbeat\n\n"


def test_many_clients_share_one_poller_that_ends_with_the_last(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        publish(tmp_path)
        stream = hub(tmp_path)
        clients = [stream.stream_events() for _ in range(5)]
        for client in clients:
            await anext(client)
        many = stream.clients
        for client in clients:
            await client.aclose()
        await stream.close()
        return many, stream.clients

    assert asyncio.run(run()) == (5, 0)


def test_streams_end_when_the_hub_closes(tmp_path: Path) -> None:
    async def run() -> int:
        publish(tmp_path)
        stream = hub(tmp_path)

        heard: list[bytes] = []

        async def listen() -> int:
            async for part in stream.stream_events():
                heard.append(part)
            return len(heard)

        listening = asyncio.ensure_future(listen())
        while len(heard) < 2:
            await asyncio.sleep(0.001)
        await stream.close()
        return await listening

    assert asyncio.run(run()) >= 2


def test_a_stream_without_a_board_beats_until_there_is_one(tmp_path: Path) -> None:
    async def run() -> bytes:
        stream = hub(tmp_path)
        events = stream.stream_events()
        await anext(events)
        beat = await anext(events)
        await events.aclose()
        await stream.close()
        return beat

    assert asyncio.run(run()) == b": heartbeat\n\n"


def test_bound_clients_get_boards_without_hard_signals_and_none_open_after_the_end(tmp_path: Path) -> None:
    async def run() -> tuple[list[bytes], list[bytes]]:
        writer = publish(tmp_path)
        streams = EventStreams(BoardCache(tmp_path / "board", hold_s=0.0), PlacerLink("http://127.0.0.1:9"))
        rows = [{"node": "n001", "type": "lost"}]
        events = streams.find_broadcaster(["research"]).stream_events()
        parts = [await anext(events), await anext(events)]
        assert streams.clients == 1
        urgent = json.dumps({"as_of_ms": NOW_MS, "rows": rows}).encode()
        writer.publish_urgent([Section("doc.urgent", urgent, NOW_MS)], NOW_MS)
        writer.publish(sections(NOW_MS + 10_000), NOW_MS + 10_000)
        parts.append(await anext(events))
        await events.aclose()
        await streams.close()
        return parts, [part async for part in streams.find_broadcaster(["new"]).stream_events()]

    parts, after = asyncio.run(run())
    assert b"event: board" in parts[-1]
    assert b"event: hard" not in b"".join(parts)
    assert after == [b"retry: 2000\n\n"]
