"""The client of the process that checks and predicts: one question at a time, and a stuck process is ended.

Estimates are cached for a moment, since pages often ask for the same estimate.
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
"""Longest time for an answer: the first one imports torch, and each builds model and data."""
MOST_WAITING = 16
KEPT_SECONDS = 20.0
"""How long an estimate is cached: configuration files and measurements of devices may change."""
MOST_KEPT = 256
_RUN = "import sys; sys.path = [p for p in sys.path if p]; from hetexp.web.checking import main; main()"
_LIMIT_BYTES = 2**22


class Checker:
    """The process that checks and predicts, started when it is first needed.

    Args:
        root: its working folder.
        environment: its environment variables.
    """

    def __init__(self, root: Path, environment: dict[str, str]) -> None:
        self._root, self._environment = root, environment
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._process: asyncio.subprocess.Process | None = None
        self._warming: asyncio.Task[Any] | None = None
        self._cache: dict[str, tuple[float, dict[str, Any]]] = {}

    def warm(self) -> None:
        """Start the process, so that the first question need not wait for its imports, which take seconds."""
        if self._process is None and self._warming is None:
            self._warming = asyncio.get_running_loop().create_task(self._warmed())

    async def ask(
        self, kind: Literal["check", "estimate"], words: Sequence[str], gpu_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Return the answer to one question.

        Raises:
            RefusedError: the configuration is wrong (422), the answer takes too long (422), or too many
                questions wait (429).
        """
        question = {"kind": kind, "words": list(words), "gpu_ids": list(gpu_ids)}
        answer = self._cached(question)
        if answer is None:
            if self._waiting >= MOST_WAITING:
                message = "Too many configurations wait to be checked; ask again later."
                raise RefusedError(429, [(None, message)])
            self._waiting += 1
            try:
                async with self._lock:
                    # The same question may have been answered meanwhile.
                    answer = self._cached(question) or self._keep(question, await self._answer(question))
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

    def _cached(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the cached answer to a question, `None` without a fresh one."""
        moment, answer = self._cache.get(json.dumps(question), (0.0, None))
        return answer if time.monotonic() - moment < KEPT_SECONDS else None

    def _keep(self, question: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """Cache an estimate and return it; checks and failures are never cached."""
        if question["kind"] == "estimate" and not answer["problems"]:
            while len(self._cache) >= MOST_KEPT:
                self._cache.pop(next(iter(self._cache)))  # the oldest
            self._cache.pop(json.dumps(question), None)
            self._cache[json.dumps(question)] = (time.monotonic(), answer)
        return answer

    async def _warmed(self) -> None:
        with contextlib.suppress(OSError):  # the first question reports it
            async with self._lock:
                await self._started()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            process = await self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(question).encode() + b"\n")
            await process.stdin.drain()
            line = await asyncio.wait_for(process.stdout.readline(), LIMIT_SECONDS)
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            message = (
                "The configuration ended the process that checks it; it may need more memory than there is."
            )
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            message = f"The configuration could not be checked within {LIMIT_SECONDS:g} s."
        except (OSError, ValueError) as error:
            message = f"The configuration could not be checked: {error}"
        except BaseException:  # cancelled: the next question would get the answer to this one
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
