"""A client of several devices in a federation: killed, and gone on with by one device."""

from pathlib import Path

import psutil
from processes import Commands, Federation, free_address, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM


def test_a_killed_client_of_two_devices_goes_on_with_one(
    commands: Commands, federation: Federation, site_file: Path, tmp_path: Path
) -> None:
    steps = 4
    address = free_address()
    deadlines = {"join_s": 300, "step_s": 300, "rejoin_s": 300, "pause_s": 300}
    config = write_run(tmp_path, steps=steps, block_steps=steps, deadlines=deadlines)
    server = commands.start(*federation.server(config, address, tmp_path / "server"))
    peer = commands.start(*federation.client("b", address, tmp_path / "b", site_file))
    command = federation.client("a", address, tmp_path / "a", site_file)
    two = commands.start(*command, "--devices", "2")
    two.await_that((tmp_path / "a" / "checkpoints" / "step-00000002.pt").exists)
    workers = [child for child in psutil.Process(two.popen.pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 1
    two.kill()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    one = commands.start(*command, "--devices", "1")
    assert "resuming from the checkpoint before step" in one.succeed().stdout
    peer.succeed()
    server.succeed()
    lines = read_lines(tmp_path / "a" / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(steps))
    assert all(line["cross_rollouts"] > 0 for line in lines)
    assert read_json(tmp_path / "a" / "summary.json")["agents"]["a"]["own_rollouts"] == steps * 16
    AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model")
