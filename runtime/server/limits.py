"""The limit of queued prompt tokens, with the time after which a refused client may try again."""

from __future__ import annotations

import threading
import time
from collections import deque

from redraft.runtime.server.errors import ApiError

_REMEMBERED = 64
"""Choices from whose pace the wait is estimated."""


class Backlog:
    """Prompt tokens of requests that have no first token yet. All methods may be called from any thread."""

    def __init__(self, most: int | None) -> None:
        """most: tokens that may be queued; None takes any number. A queue that is empty takes any request."""
        self._most = most
        self._lock = threading.Lock()
        self._left: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        self.tokens = 0

    def enter(self, tokens: int) -> None:
        """Add the tokens of all choices of a request. Raises ApiError (429) if too many are queued."""
        with self._lock:
            if self._most is not None and self.tokens and self.tokens + tokens > self._most:
                excess = min(self.tokens + tokens - self._most, self.tokens)
                raise ApiError(
                    429, f"{self.tokens} prompt tokens are queued already, of at most {self._most}",
                    code="queued_tokens", retry_after=self._seconds(excess),
                )  # fmt: skip
            if not self.tokens:  # the time without requests says nothing of their pace
                self._left.clear()
                self._left.append((time.monotonic(), 0))
            self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """Take out the tokens of a choice that has its first token."""
        with self._lock:
            self.tokens -= tokens
            self._left.append((time.monotonic(), tokens))

    def cancel(self, tokens: int) -> None:
        """Take out tokens of choices that get no token. They say nothing of the pace."""
        with self._lock:
            self.tokens -= tokens

    def _seconds(self, tokens: int) -> float:
        """Return in how many seconds so many tokens leave the queue, by the latest pace; 1 if that is unknown."""
        if len(self._left) < 2:
            return 1.0
        seconds = self._left[-1][0] - self._left[0][0]
        left = sum(count for _, count in list(self._left)[1:])
        return tokens * seconds / max(left, 1)
