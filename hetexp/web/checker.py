"""Asks the process that checks and predicts, one question after the other; a stuck one is ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hetexp.web.refused import RefusedError, keyed

LIMIT_SECONDS = 60.0
"""Longest answer: it imports torch first, and builds the model and the data."""
MOST_WAITING = 16
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

    async def ask(
        self, kind: Literal["check", "estimate"], words: Sequence[str], gpu_ids: Sequence[str]
    ) -> dict[str, Any]:
        """Return the answer to one question.

        Raises:
            RefusedError: the configuration is wrong (422), the answer takes too long (422), or too many wait
                already (429).
        """
        if self._waiting >= MOST_WAITING:
            raise RefusedError(429, [(None, "Too many configurations wait to be checked; ask again later.")])
        self._waiting += 1
        try:
            async with self._lock:
                answer = await self._answer({"kind": kind, "words": list(words), "gpu_ids": list(gpu_ids)})
        finally:
            self._waiting -= 1
        if answer["problems"]:
            raise RefusedError(422, [keyed(problem) for problem in answer["problems"]])
        return answer

    async def close(self) -> None:
        """End the process."""
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
            told = (
                "The configuration ended the process that checks it; it may need more memory than there is."
            )
        except asyncio.TimeoutError:  # another class than TimeoutError before Python 3.11
            told = f"The configuration could not be checked within {self._limit:g} s."
        except (OSError, ValueError) as error:
            told = f"The configuration could not be checked: {error}"
        except BaseException:  # cancelled: the answer to this question would be taken for the next one's
            await self.close()
            raise
        await self.close()
        return {"problems": [told]}

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
