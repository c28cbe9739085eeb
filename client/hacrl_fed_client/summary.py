"""What a run comes to at a site: the summary beside the final model."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from hacrl_fed.config import RunConfig
from hacrl_fed.run_folder import write_whole
from hacrl_fed_client.egress import Egress
from hacrl_fed_client.progress import Progress

FILE_NAME = "summary.json"


def write_summary(
    run_dir: Path, agent: str, run: RunConfig, method: str, progress: Progress, egress: Egress, weight_bytes: int
) -> None:
    """Writes ``summary.json``. Refusals are counted by reason, and again by the agent that was refused.

    Raises HacrlFedError where it cannot be written.
    """
    by_reason: Counter[str] = Counter()
    by_agent: dict[str, dict[str, int]] = defaultdict(dict)
    for key, count in progress.refused.items():
        source, _, reason = key.rpartition("/")
        by_reason[reason] += count
        by_agent[source][reason] = count
    summary: dict[str, Any] = {
        "method": method,
        "seed": run.seed,
        "steps": run.steps,
        "wall_s": round(progress.wall_s, 3),
        "agents": {
            agent: {
                "before": progress.evaluations.get("before", {}),
                "after": progress.evaluations.get("after", {}),
                "own_rollouts": progress.totals["own_rollouts"],
                "cross_rollouts": progress.totals["cross_rollouts"],
                "refused": dict(by_reason),
                "refused_by_agent": dict(by_agent),
                "egress_bytes": egress.sent_bytes,
                "ingress_bytes": egress.received_bytes,
                "weight_bytes": weight_bytes,
                "reward_disagreements": dict(progress.reward_disagreements),
                "missing_chunks": progress.totals["missing_chunks"],
                "prompts_too_long": progress.totals["prompts_too_long"],
            }
        },
    }
    write_whole(run_dir / FILE_NAME, json.dumps(summary, indent=2))
