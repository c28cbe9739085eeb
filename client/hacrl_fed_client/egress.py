"""The record of what leaves a site: a line for each message sent, and a limit on what a step may send."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

from hacrl_fed.errors import HacrlFedError

FILE_NAME = "egress.jsonl"


class Egress:
    """Counts bytes in both directions and writes what is sent to a file. Safe to use from any thread.

    Sizes are those of the serialised messages, before compression and framing.
    """

    def __init__(self, folder: Path, bytes_per_step: int) -> None:
        self._lock = threading.Lock()
        self._limit = bytes_per_step
        self._by_step: Counter[int] = Counter()
        self._file = (folder / FILE_NAME).open("a", encoding="utf-8", buffering=1)
        self.sent_bytes = 0
        self.received_bytes = 0

    def sent(self, method: str, size: int, step: int | None = None) -> None:
        """Records a message that is about to leave. Raises HacrlFedError where it would exceed the step's limit."""
        with self._lock:
            if step is not None and self._by_step[step] + size > self._limit:
                raise HacrlFedError(
                    f"step {step} would send more than limits.egress_bytes_per_step = {self._limit} bytes; "
                    "raise it in site.yaml if that is meant"
                )
            line = {"time": round(time.time(), 3), "method": method, "bytes": size, "step": step}
            self._file.write(json.dumps(line) + "\n")
            if step is not None:
                self._by_step[step] += size
            self.sent_bytes += size

    def received(self, size: int) -> None:
        """Counts a message that came in."""
        with self._lock:
            self.received_bytes += size

    def restore(self, sent_bytes: int, received_bytes: int) -> None:
        """Goes on counting where an earlier process of this run stopped."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.received_bytes += received_bytes

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()
