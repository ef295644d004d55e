"""The inbox of one of several pipelines: samples of its own nodes, and events for the first pipeline.

Every pipeline reads all segments and records its snapshot's position in `read.<k>`. A segment is deleted
once all pipelines have passed it. When the number of pipelines changes, each pipeline begins at the lowest of
all positions. Records may then be read again, which changes nothing.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import files
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.inbox.segments import delete_read_segments, format_segment_name, parse_position
from fleetcast.ingest.shares import OwnNodeFilter, Share
from fleetcast.ingest.source import Batch, Source

logger = logging.getLogger(__name__)

PREFIX = "read."


class Mark(msgspec.Struct, frozen=True):
    """The inbox position that one of several pipelines records. It comes from the older of its two snapshots.

    instance: the pipeline's number. instances: the number of pipelines when it recorded the position.
    """

    instance: int
    instances: int
    position: dict[str, int]


class DividedInbox(Source):
    """The part of the inbox for one of several pipelines.

    It delivers samples of the pipeline's own nodes, and events to the first pipeline only. With a single pipeline, it
    delivers the same records as the InboxSource.
    """

    name = "inbox"

    def __init__(self, inbox: InboxSource, entities: Entities, share: Share) -> None:
        self._inbox = inbox
        self._share = share
        self._rows = OwnNodeFilter(share, entities)

    async def next(self) -> Batch:
        batch = await self._inbox.next()
        if self._share.instances == 1:
            return batch
        samples = tuple(own for own in map(self._rows.filter_samples, batch.samples) if len(own))
        if self._share.is_first:
            return replace(batch, samples=samples)
        return Batch(samples)

    def position(self) -> dict[str, Any]:
        return self._inbox.position()

    def seek(self, position: Mapping[str, Any]) -> None:
        """Continue after `position`. Begin at the first record instead if the number of pipelines has changed."""
        if any(mark.instances != self._share.instances for mark in read_marks(self._inbox.folder)):
            logger.warning("the number of pipelines was changed: reading the inbox from its beginning")
            position = {}
        self._inbox.seek(position)

    def begins(self) -> bool:
        return self._inbox.begins()

    def backlog_bytes(self) -> int:
        return self._inbox.backlog_bytes()

    def health(self) -> dict[str, Any]:
        return self._inbox.health()

    def models(self) -> dict[str, str]:
        """Return node → GPU model, from the labels of remote writes."""
        return self._inbox.models()

    def prune(self, position: Mapping[str, Any]) -> int:
        """Record this pipeline's position, and delete the segments that all pipelines have passed.

        Returns the number of deleted segments.
        """
        folder, share = self._inbox.folder, self._share
        folder.mkdir(parents=True, exist_ok=True)
        mark = Mark(share.instance, share.instances, dict(position))
        files.replace_file(folder / f"{PREFIX}{mark.instance}", [msgspec.json.encode(mark)], "mark")
        marks = read_marks(folder)
        current = [mark for mark in marks if mark.instances == share.instances]
        if len(current) < share.instances:  # one that comes later may have to read from the beginning
            return 0
        for mark in marks:
            if mark.instance >= share.instances:  # what it had not read, the others have by now
                (folder / f"{PREFIX}{mark.instance}").unlink(missing_ok=True)
        return delete_read_segments(folder, find_lowest_positions([mark.position for mark in current]))

    async def close(self) -> None:
        await self._inbox.close()


def find_lowest_positions(positions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return, for each writer that is in all of `positions`, its lowest position.

    >>> positions = [{"api-000000000002.seg": 16}, {"api-000000000001.seg": 99, "api.1-000000000001.seg": 16}]
    >>> find_lowest_positions(positions)
    {'api-000000000001.seg': 99}
    """
    tables = [{writer: (number, offset) for (writer, number), offset in parse_position(row)} for row in positions]
    shared = set.intersection(*(set(table) for table in tables)) if tables else set()
    found = {writer: min(table[writer] for table in tables) for writer in sorted(shared)}
    return {format_segment_name(writer, number): offset for writer, (number, offset) in found.items()}


def read_marks(folder: Path) -> list[Mark]:
    """Read the marks in a folder, ordered by instance. An unreadable mark is logged and left out."""
    marks = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        try:
            marks.append(msgspec.json.decode(path.read_bytes(), type=Mark))
        except (OSError, msgspec.MsgspecError) as error:
            logger.warning("%s cannot be read (%s), the inbox deletes nothing until it is written again", path, error)
    return sorted(marks, key=lambda mark: mark.instance)
