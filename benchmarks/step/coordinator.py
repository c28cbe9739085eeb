"""The coordinator's process of a federation that is measured."""

import threading
import time
from multiprocessing.connection import Connection

from rich.console import Console

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import transport
from hacrl_fed.protocol.identity import load_coordinator
from hacrl_fed.status import RunStatus
from hacrl_fed_server.coordinator import run_server
from step.federated import Files
from step.ours import run_config
from step.workloads import Workload

_START_S = 60.0


def serve(connection: Connection, files: Files, workload: Workload, texts: list[str], steps: int) -> None:
    """Runs the coordinator until this process is ended, and tells its address."""
    roster, key = load_coordinator(files.roster, files.key("coordinator"))
    arguments = {
        "run": run_config(workload, "hacpo", steps),
        "roster": roster,
        "key": key,
        "listen": "127.0.0.1:0",
        "run_dir": files.run_dir("coordinator"),
        "tls": transport.ServerTls(files.tls("server"), files.tls("server-key")),
        "allow_remote": False,
        "console": Console(stderr=True),
    }
    server = threading.Thread(target=run_server, kwargs=arguments)
    server.start()
    deadline = time.monotonic() + _START_S
    while not (status := RunStatus.read(files.run_dir("coordinator"))):
        if not server.is_alive() or time.monotonic() > deadline:
            raise HacrlFedError(f"the coordinator did not start within {_START_S:.0f} s")
        time.sleep(0.05)
    connection.send(status.address)
    server.join()
