"""Reading expert slices from flash into place, over a few lanes.

Under O_DIRECT a read covers the page-aligned window around a slice and lands straight in the expert memory,
which keeps `address = file offset` modulo the page size; nothing is bounced or copied.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from simlab.errors import RunError, SimlabWarning
from simlab.record.ggml import memory

PAGE = 4096
Preadv = Callable[[int, list, int], int]


class Slice(NamedTuple):
    """One projection of one expert: where it lies in the file and where it goes in memory."""

    layer: int
    expert: int
    projection: str
    path: Path
    offset: int
    size: int
    address: int
    region: int
    """Index of the projection's memory region."""


class FinishedRead(NamedTuple):
    """One read as it went."""

    slice: Slice
    lane: int
    offset: int
    window_bytes: int
    """Asked of the device: whole pages, as far as the file goes."""
    start_ns: int
    latency_ns: int


def page_window(offset: int, size: int) -> tuple[int, int]:
    """First and past-the-last byte of the pages that hold `[offset, offset + size)`; a file may end before."""
    return offset & ~(PAGE - 1), -(-(offset + size) // PAGE) * PAGE


def not_direct(path: Path, preadv: Preadv = os.preadv) -> str:
    """Why O_DIRECT does not read a file from its device; empty where it does."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            if (kind := _file_system(descriptor)) in ("tmpfs", "ramfs"):
                return f"reads memory here, where the file system is {kind}"
            # An anonymous map starts on a page, as direct reads want.
            with mmap.mmap(-1, PAGE) as buffer, path.open("rb") as file:
                n = preadv(descriptor, [buffer], 0)
                return "" if buffer[:n] == file.read(PAGE) else "returned other bytes than a buffered read"
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"is refused here ({error.strerror})"


def _file_system(descriptor: int) -> str:
    """Type of the file system that an open file lies in, by its mount in /proc; empty where /proc does not say."""
    of_file = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    mount = next((line.split()[1] for line in of_file if line.startswith("mnt_id:")), None)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[0] == mount:
            return line.partition(" - ")[2].split()[0]
    return ""


class PendingReads(NamedTuple):
    """Reads under way: how many lanes still have to answer, and where."""

    n_answers: int
    answers: queue.SimpleQueue


class ReadLanes:
    """1 to 8 reader lanes over a model's files.

    Reading serially, lane 0 is the calling thread and the others wait for work. With `background`, every
    lane is a thread, so that reads go on while the caller computes; a lane takes shares in the order given.
    `first_lane` numbers the lanes of a second reader after those of the first.

    `direct` is what is in force: O_DIRECT is checked at open against a buffered read, and given up, with a
    warning, where the file system refuses it, lies in memory or returns other bytes.
    """

    def __init__(
        self,
        files: Sequence[Path],
        lanes: int = 4,
        direct: bool = True,
        preadv: Preadv = os.preadv,
        background: bool = False,
        first_lane: int = 0,
    ) -> None:
        self.n_lanes = lanes
        self.background = background
        self._preadv = preadv
        self.direct = direct and self._direct_works(files)
        flags = os.O_RDONLY | (os.O_DIRECT if self.direct else 0)
        self._descriptors = {path: os.open(path, flags) for path in files}
        self._sizes = {path: path.stat().st_size for path in files}
        self._work: dict[int, queue.SimpleQueue] = {
            lane: queue.SimpleQueue() for lane in range(0 if background else 1, lanes)
        }
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(work, first_lane + lane),
                name=f"simlab-lane-{first_lane + lane}",
                daemon=True,
            )
            for lane, work in self._work.items()
        ]
        for thread in self._threads:
            thread.start()

    def _direct_works(self, files: Sequence[Path]) -> bool:
        for path in files:
            if reason := not_direct(path, self._preadv):
                warnings.warn(
                    f"{path}: O_DIRECT {reason}; reading buffered, so read times are not the flash's",
                    SimlabWarning,
                    stacklevel=4,
                )
                return False
        return True

    def read(self, slices: Sequence[Slice]) -> list[FinishedRead]:
        """Read slices into place, spread over the lanes; returns when all are there.

        Raises:
            RunError: a read failed or the file ended early, with the file, offset and errno.
        """
        if self.background:
            return self.collect(self.submit(slices))
        own = slices[:: self.n_lanes]
        others = self._hand_out(slices)
        outcome = self._read_share(0, own)
        finished = self.collect(others)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome + finished

    def submit(self, slices: Sequence[Slice]) -> PendingReads:
        """Start reading slices on the lanes of a `background` reader; `collect` waits for them."""
        if not self.background:
            raise RunError("this reader has no background lanes")
        return self._hand_out(slices)

    def collect(self, pending: PendingReads) -> list[FinishedRead]:
        """Wait for reads under way.

        Raises:
            RunError: as `read`; raised when every lane has answered.
        """
        outcomes = [pending.answers.get() for _ in range(pending.n_answers)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return [read for outcome in outcomes for read in outcome]

    def _hand_out(self, slices: Sequence[Slice]) -> PendingReads:
        """Give every lane that is a thread its share of the slices."""
        pending = PendingReads(sum(lane < len(slices) for lane in self._work), queue.SimpleQueue())
        for lane, work in self._work.items():
            if lane < len(slices):
                work.put((slices[lane :: self.n_lanes], pending.answers))
        return pending

    def _serve(self, work: queue.SimpleQueue, lane: int) -> None:
        while (task := work.get()) is not None:
            share, answers = task
            answers.put(self._read_share(lane, share))

    def _read_share(self, lane: int, share: Sequence[Slice]) -> list[FinishedRead] | BaseException:
        try:
            return [self._read_one(lane, s) for s in share]
        except BaseException as error:
            return error

    def _read_one(self, lane: int, s: Slice) -> FinishedRead:
        first, last = page_window(s.offset, s.size) if self.direct else (s.offset, s.offset + s.size)
        address = s.address - (s.offset - first)
        wanted = min(last, self._sizes[s.path]) - first
        start = time.perf_counter_ns()
        done = 0
        while done < wanted:
            # After a short direct read the next one must start on a page again.
            at = done & ~(PAGE - 1) if self.direct else done
            try:
                n = self._preadv(
                    self._descriptors[s.path], [memory(address + at, last - first - at)], first + at
                )
                if at + n <= done:
                    raise OSError(errno.EIO, "the file ends before the expert does")
            except OSError as error:
                raise RunError(
                    f"{s.path}: reading {last - first} bytes at offset {first} failed: {error.strerror} "
                    f"(errno {error.errno}); the decode was stopped"
                ) from error
            done = at + n
        return FinishedRead(s, lane, first, wanted, start, time.perf_counter_ns() - start)

    def close(self) -> None:
        """Stop the lanes and close the files."""
        for work in self._work.values():
            work.put(None)
        for thread in self._threads:
            thread.join()
        for descriptor in self._descriptors.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptors = {}
