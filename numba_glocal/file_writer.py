"""Files written by a thread beside the computing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class FileWriter:
    """Writes files beside what computes the next ones; when its block ends well all are there, or the first error is raised."""

    def __enter__(self) -> FileWriter:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._files: list[Future[Any]] = []
        return self

    def write(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls ``function(*args)`` after those given before; what it is given must not change any more."""
        self._files.append(self._thread.submit(function, *args))

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown(wait=True)
        if kind is None:
            for file in self._files:
                file.result()
