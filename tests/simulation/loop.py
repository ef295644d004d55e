"""An event loop that runs one handle when it is told to, on a clock that is moved by hand.

Handles of one process run in the order in which asyncio promises to run them; which process is next, when a thread's
work is done and how far the clock goes is for the world to choose. So `asyncio.to_thread` and executors are
interleavings that a seed chooses, and every run of a seed is the same.
"""

import asyncio
import contextlib
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any


class SimLoop(asyncio.AbstractEventLoop):
    """The loop of one process. `failed` is called with what a task or handle raised that nobody took."""

    def __init__(self, steady_s: Callable[[], float], failed: Callable[[BaseException], None]) -> None:
        self._steady_s = steady_s
        self._failed = failed
        self.ready: deque[asyncio.Handle] = deque()
        self.works: list[Callable[[], None]] = []  # of threads
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.closed = False

    # -- what the world asks

    def wake(self) -> None:
        """Timers that are due become ready."""
        now = self._steady_s()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                self.ready.append(timer)

    def next_timer_s(self) -> float | None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def run_handle(self) -> None:
        handle = self.ready.popleft()
        if not handle.cancelled():
            self.run(handle._run)

    def run_work(self, at: int) -> None:
        self.run(self.works.pop(at))

    def run(self, call: Callable[[], Any]) -> Any:
        """Call something as if it were a handle of this loop."""
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            return call()
        finally:
            events._set_running_loop(before)

    def drop(self) -> None:
        """The process has ended: its coroutines are closed, so that none ends later by chance."""
        self.closed = True
        self.ready.clear()
        self.works.clear()
        self._timers.clear()
        for task in self._tasks:
            task._log_destroy_pending = False
            coroutine = task.get_coro()
            with contextlib.suppress(BaseException):  # a dead process raises at whatever it touches
                self.run(coroutine.close)
            if task.done() and not task.cancelled():
                task.exception()  # nobody else asks
        self._tasks.clear()

    # -- what asyncio asks

    def time(self) -> float:
        return self._steady_s()

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.closed

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.closed:
            self.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._count += 1
        if not self.closed:
            heapq.heappush(self._timers, (when, self._count, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **named: Any) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, **named)
        if len(self._tasks) > 64:
            self._tasks = [row for row in self._tasks if not row.done()]
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """The work is done by a later step."""
        done: asyncio.Future[Any] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        self.works.append(work)
        return done

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self._failed(context.get("exception") or RuntimeError(context["message"]))
