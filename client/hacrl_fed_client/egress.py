"""The record of what leaves a site: a line for each message sent, and a limit on what a step may send."""

import json
import threading
import time
from collections import Counter
from pathlib import Path

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.run_folder import keep_json_lines

FILE_NAME = "egress.jsonl"


class Egress:
    """Counts bytes in both directions and writes what is sent to a file. Safe to use from any thread.

    The file goes on where an earlier process of the run left it.

    Sizes are those of the serialised messages, before compression and framing.
    """

    def __init__(self, folder: Path, bytes_per_step: int) -> None:
        self._lock = threading.Lock()
        self._limit = bytes_per_step
        self._by_step: Counter[int] = Counter()
        earlier = keep_json_lines(folder / FILE_NAME, lambda line: True)
        self._file = (folder / FILE_NAME).open("a", encoding="utf-8", buffering=1)
        self.sent_bytes = sum(line["bytes"] for line in earlier)
        for line in earlier:
            if line["step"] is not None:
                self._by_step[line["step"]] += line["bytes"]
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

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()
