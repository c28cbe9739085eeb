"""Warnings of a site that name their remedy."""

import io

from rich.console import Console

from hacrl_fed.config import AlgorithmConfig
from hacrl_fed_client.console import SiteConsole


def warnings(method: str, step: int = 0, repeat: int = 1, **hacpo: object) -> list[str]:
    output = io.StringIO()
    console = SiteConsole(Console(file=output, width=1000), "me")
    algorithm = AlgorithmConfig.model_validate({"method": method, "hacpo": hacpo})
    for again in range(repeat):
        console.few_live(step + again, 0.125, algorithm)
    return output.getvalue().splitlines()


def test_few_live_rollouts_are_told_with_what_helps() -> None:
    (paper,) = warnings("hacpo")
    assert "12%" in paper and "cross_band to signed" in paper and "cross_clip_low" in paper
    (signed,) = warnings("hacpo", cross_band="signed", positive_floor=0.3)
    assert "positive_floor (0.3)" in signed and "cross_band" not in signed
    (naive,) = warnings("naive")
    assert "algorithm.method hacpo" in naive


def test_a_warning_comes_now_and_then_only() -> None:
    assert 1 < len(warnings("hacpo", repeat=30)) < 10


def test_foreign_sources_are_named_and_starve_no_other_warning() -> None:
    output = io.StringIO()
    console = SiteConsole(Console(file=output, width=1000), "me")
    algorithm = AlgorithmConfig.model_validate({"hacpo": {"source_floor": 0.05}})
    console.foreign(0, {"b": 0.001, "a": 0.04}, algorithm)
    console.few_live(0, 0.01, algorithm)
    foreign, few = output.getvalue().splitlines()
    assert "rollouts of a (median ratio 0.04), b (median ratio 0.001) are left out" in foreign and "0.05" in foreign
    assert "1%" in few
