"""Asks the process that checks and predicts, one question at a time; a stuck process is ended.

An estimate is cached for a moment: pages ask for the same estimate again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hetexp.web.refused import RefusedError, keyed

LIMIT_SECONDS = 60.0
"""Longest answer: it imports torch first, and builds the model and the data."""
MOST_WAITING = 16
KEPT_SECONDS = 20.0
"""How long an estimate is given again: configuration files and what was measured of devices may change."""
MOST_KEPT = 256
_RUN = "import sys; sys.path = [p for p in sys.path if p]; from hetexp.web.checking import main; main()"
_LIMIT_BYTES = 2**22


class Checker:
    """The process, started when it is first needed.

    Args:
        root: the working folder.
        environment: of the process.
    """

    def __init__(self, root: Path, environment: dict[str, str], limit_seconds: float = LIMIT_SECONDS) -> None:
        self._root, self._environment, self._limit = root, environment, limit_seconds
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._warming: asyncio.Task[Any] | None = None
        self._kept: dict[str, tuple[float, dict[str, Any]]] = {}

    def warm(self) -> None:
        """Start the process: its imports take seconds, for which the first question need not wait then."""
        if self._process is None and self._warming is None:
            self._warming = asyncio.get_running_loop().create_task(self._warmed())

    async def ask(
        self, kind: Literal["check", "estimate"], words: Sequence[str], gpu_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Return the answer to one question.

        Raises:
            RefusedError: the configuration is wrong (422), the answer takes too long (422), or too many wait
                already (429).
        """
        order = {"kind": kind, "words": list(words), "gpu_ids": list(gpu_ids)}
        answer = self._known(order)
        if answer is None:
            if self._waiting >= MOST_WAITING:
                message = "Too many configurations wait to be checked; ask again later."
                raise RefusedError(429, [(None, message)])
            self._waiting += 1
            try:
                async with self._lock:
                    # Whoever waited for the same question has its answer now.
                    answer = self._known(order) or self._keep(order, await self._answer(order))
            finally:
                self._waiting -= 1
        if answer["problems"]:
            raise RefusedError(422, [keyed(problem) for problem in answer["problems"]])
        return answer

    async def close(self) -> None:
        """End the process."""
        warming, self._warming = self._warming, None
        if warming is not None and not warming.done():
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
        await self._end()

    def _known(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """Return the answer that was given to a question a moment ago."""
        moment, answer = self._kept.get(json.dumps(order), (0.0, None))
        return answer if time.monotonic() - moment < KEPT_SECONDS else None

    def _keep(self, order: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Keep an estimate; what a training starts with, or what failed, is always checked again."""
        if order["kind"] == "estimate" and not answer["problems"]:
            while len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))  # the oldest
            self._kept.pop(json.dumps(order), None)
            self._kept[json.dumps(order)] = (time.monotonic(), answer)
        return answer

    async def _warmed(self) -> None:
        with contextlib.suppress(OSError):  # a question will tell
            async with self._lock:
                await self._started()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            process = await self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), self._limit)
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            message = (
                "The configuration ended the process that checks it; it may need more memory than there is."
            )
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            message = f"The configuration could not be checked within {self._limit:g} s."
        except (OSError, ValueError) as error:
            message = f"The configuration could not be checked: {error}"
        except BaseException:  # cancelled: the answer to this question would be taken for the next one's
            await self._end()
            raise
        await self._end()
        return {"problems": [message]}

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                _RUN,
                cwd=self._root,
                env=self._environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_LIMIT_BYTES,
            )
        return self._process
