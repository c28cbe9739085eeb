"""Configuration: the paper's defaults, faults told in one sentence, and who wins."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hacrl_fed.algorithms.config import HacpoConfig
from hacrl_fed.config import (
    AlgorithmConfig,
    Optimizer,
    RunConfig,
    SimulationConfig,
    SiteConfig,
    StrictModel,
    load,
    merged_algorithm,
    parse,
    rooted,
)
from hacrl_fed.errors import UserError
from hacrl_fed.protocol.roster import Roster

LEAST: dict[str, Any] = {"task": "digit-maps", "steps": 3}


def test_defaults_are_the_papers() -> None:
    run = RunConfig(**LEAST)
    assert (run.prompts_per_step, run.group_size) == (128, 8)
    assert (run.max_prompt_tokens, run.max_new_tokens) == (1024, 4096)
    assert (run.algorithm.method, run.algorithm.prompts_per_mini_batch) == ("hacpo", 64)
    assert run.algorithm.kl_coef == 0.001
    assert run.algorithm.hacpo == HacpoConfig(
        alpha=1.0, cross_clip_low=0.8, cross_clip_step=0.025, cross_band="paper", eps_low=3e-4, eps_high=4e-4
    )
    assert (run.algorithm.hacpo.window, run.algorithm.hacpo.ratio_min, run.algorithm.hacpo.ratio_max) == (5, 0.1, 10.0)
    assert Optimizer().lr == 1e-6
    assert run.min_agents == 2
    assert run.limits.chunk_bytes == 1 << 20


@pytest.mark.parametrize(
    ("kind", "data", "sentence"),
    [
        (RunConfig, {"step": 3}, "unknown key step; did you mean steps?"),
        (RunConfig, {"deadlines": {"steps": 3}}, "unknown key deadlines.steps; did you mean step_s?"),
        (RunConfig, {"limits": {"chunk_size": 3}}, "unknown key limits.chunk_size; did you mean chunk_bytes?"),
        (RunConfig, {"algorithm": {"methods": 3}}, "unknown key algorithm.methods; did you mean method?"),
        (RunConfig, {"algorithm": {"hacpo": {"alfa": 3}}}, "unknown key algorithm.hacpo.alfa; did you mean alpha?"),
        (SiteConfig, {"lora": {"alfa": 3}}, "unknown key lora.alfa; did you mean alpha?"),
        (SiteConfig, {"optimizer": {"thread": 3}}, "unknown key optimizer.thread"),
        (
            SiteConfig,
            {"tasks": {"x": {"kind": "jsonl", "path": "x", "verify": "math"}}},
            "unknown key tasks.x.jsonl.verify; did you mean verifier?",
        ),
        (
            SiteConfig,
            {"tasks": {"x": {"kind": "jsonl", "path": "x", "size": 9}}},
            "unknown key tasks.x.jsonl.size",
        ),
        (Roster, {"agents": [{"nam": "a"}]}, "unknown key agents.0.nam; did you mean name?"),
        (
            SimulationConfig,
            {"run": LEAST, "agents": {"a": {"demo_model": "a", "site": {"lora": {"alfa": 3}}}}},
            "unknown key agents.a.site.lora.alfa; did you mean alpha?",
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest_one_of_its_section(
    kind: type[StrictModel], data: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError) as fault:
        parse(kind, (LEAST if kind is RunConfig else {}) | data, "a.yaml")
    assert str(fault.value) == f"a.yaml: {sentence}"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"group_size": 1}, "group_size: Input should be greater than or equal to 2"),
        ({"task": "../x"}, "task.id: task id must be 1 to 64 letters"),
        ({"task": {"id": "x", "digest": "y"}}, "task.digest: task digest must be a SHA-256"),
        ({"deadlines": {"step_s": 0}}, "deadlines.step_s: Input should be greater than 0"),
        ({"deadlines": {"step_s": float("inf")}}, "deadlines.step_s: Input should be a finite number"),
        ({"algorithm": {"method": "ppo"}}, "algorithm.method: Input should be 'hacpo', 'gspo'"),
        ({"algorithm": {"hacpo": {"cross_clip_low": 1.5}}}, "algorithm.hacpo: cross_clip_low must be at most 1"),
        ({"task": None}, "task: Input should be a valid dictionary"),
    ],
)
def test_a_bad_value_is_told_with_its_key(data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as fault:
        parse(RunConfig, LEAST | data, "run.yaml")
    assert str(fault.value).startswith(f"run.yaml: {sentence}")
    assert "\n" not in str(fault.value)


def test_a_typo_is_told_before_the_key_that_it_leaves_missing() -> None:
    with pytest.raises(UserError, match=r"unknown key setps; did you mean steps\?"):
        parse(RunConfig, {"task": "x", "setps": 3}, "run.yaml")
    with pytest.raises(UserError, match="key steps is missing"):
        parse(RunConfig, {"task": "x"}, "run.yaml")


def test_a_file_and_overrides_over_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("task: digit-maps\nsteps: 3\ndeadlines: {step_s: 5}\n", encoding="utf-8")
    run = load(RunConfig, path, ["steps=4", "deadlines.rejoin_s=2.5", "algorithm.hacpo.alpha=3", "task=other"])
    assert (run.steps, run.task.id) == (4, "other")
    assert (run.deadlines.step_s, run.deadlines.rejoin_s) == (5, 2.5)
    assert run.algorithm.hacpo.alpha == 3
    assert load(SiteConfig, None, ["lora.r=4", "lora.target_modules=[q_proj, v_proj]"]).lora is not None
    assert load(SiteConfig, None) == SiteConfig()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps", "--set takes key.path=value, not 'steps'"),
        ("=3", "--set takes key.path=value"),
        ("steps.more=3", "--set steps.more: steps is a value, not a section"),
        ("steps=[", r"--set steps: '\[' is not a YAML value"),
        ("deadlines.stepp_s=3", r"unknown key deadlines.stepp_s; did you mean step_s\?"),
    ],
)
def test_a_bad_override_is_told(tmp_path: Path, override: str, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("{task: x, steps: 3}", encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        load(RunConfig, path, [override])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"steps: [", "is not YAML"),
        (b"- a\n- b", "must hold keys and values, not list"),
        (b"# steps: 3", "key task is missing"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as fault:
        load(RunConfig, path)
    assert str(path) in str(fault.value)
    assert "\n" not in str(fault.value)
    with pytest.raises(UserError, match="there is no configuration file"):
        load(RunConfig, tmp_path / "none.yaml")


def test_the_sites_algorithm_wins_key_by_key() -> None:
    run = RunConfig(**LEAST, algorithm={"kl_coef": 0.5, "hacpo": {"alpha": 3.0, "window": 7}})
    assert merged_algorithm(run, SiteConfig()) == run.algorithm
    merged = merged_algorithm(run, SiteConfig(algorithm={"kl_coef": 0.0, "hacpo": {"alpha": 0.0}}))
    assert (merged.kl_coef, merged.hacpo.alpha) == (0.0, 0.0)
    assert (merged.hacpo.window, merged.prompts_per_mini_batch) == (7, 64)  # as the run says
    assert isinstance(merged, AlgorithmConfig)
    with pytest.raises(UserError, match=r"algorithm of the site: unknown key hacpo\.alfa; did you mean alpha\?"):
        merged_algorithm(run, SiteConfig(algorithm={"hacpo": {"alfa": 0.0}}))
    with pytest.raises(UserError, match=r"algorithm\.method is the run's to choose"):
        merged_algorithm(run, SiteConfig(algorithm={"method": "gspo"}))


def test_a_run_configuration_survives_the_wire_and_cannot_be_changed() -> None:
    run = RunConfig(**LEAST, deadlines={"step_s": 0.1})
    assert RunConfig.model_validate_json(run.model_dump_json()) == run
    with pytest.raises(ValidationError):
        run.steps = 4  # type: ignore[misc]


@pytest.mark.parametrize("agent", [{}, {"model": "m", "demo_model": "a"}])
def test_a_simulated_agent_has_exactly_one_model(agent: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"agents\.a: exactly one of model and demo_model must be given"):
        parse(SimulationConfig, {"run": LEAST, "agents": {"a": agent}}, "sim.yaml")


def test_paths_are_relative_to_the_file_that_names_them(tmp_path: Path) -> None:
    tasks = {"x": {"kind": "jsonl", "path": "x.jsonl"}, "y": {"kind": "reasoning_gym", "dataset": "chain_sum"}}
    site = rooted(SiteConfig.model_validate({"chat_template": "chat.jinja", "tasks": tasks}), tmp_path)
    assert site.chat_template == tmp_path / "chat.jinja"
    assert site.tasks["x"].path == tmp_path / "x.jsonl" and site.tasks["y"].kind == "reasoning_gym"
    assert rooted(site, tmp_path / "other") == site
    assert rooted(SiteConfig(), tmp_path).chat_template is None
