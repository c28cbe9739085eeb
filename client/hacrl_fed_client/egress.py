"""The record of what leaves a site: a line for each message sent, and a limit on what a step may send."""

import errno
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.run_folder import keep_json_lines, writing

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
        self._path = folder / FILE_NAME
        earlier = keep_json_lines(self._path, lambda line: True)
        self._file = self._path.open("ab", buffering=0)
        self.sent_bytes = sum(line["bytes"] for line in earlier)
        for line in earlier:
            if line["step"] is not None:
                self._by_step[line["step"]] += line["bytes"]
        self.received_bytes = 0

    def sent(self, method: str, size: int, step: int | None = None) -> None:
        """Records a message that is about to leave.

        Raises HacrlFedError where it would exceed the step's limit, or cannot be recorded: it must not leave then.
        """
        with self._lock:
            if step is not None and self._by_step[step] + size > self._limit:
                raise HacrlFedError(
                    f"step {step} would send more than limits.egress_bytes_per_step = {self._limit} bytes; "
                    "raise it in site.yaml if that is meant"
                )
            line = {"time": round(time.time(), 3), "method": method, "bytes": size, "step": step}
            record = json.dumps(line).encode() + b"\n"
            with writing(self._path):
                # A disk that fills up takes the beginning of a line without an error.
                if self._file.write(record) < len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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
