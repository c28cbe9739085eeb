"""The learning study: its statistics, its units and their resuming, its command, and that sharing wins where it should."""

import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats

import learning
from hacrl_fed.config import SimulationConfig, load
from hacrl_fed.run_folder import locked
from hacrl_fed.tasks import digit_maps
from study import tasks
from study.outcomes import difference, outcome
from study.plots import plot_regime
from study.regimes import MAPS, REGIMES, AgentSpec, Regime, Seat
from study.report import as_json, as_markdown, print_regime
from study.statistics import estimate, mean_height, paired_difference
from study.tuning import best_rate
from study.units import Plan, Training, digest, load_result, model_folder, result_file, trainings
from study.variants import COMPARED, LEARNING_RATES, TUNING_GRID, VARIANTS, learning_rate
from study.work import outcome_of, outcomes_of
from study.workers import run_missing, run_unit

PLAN = Plan(steps=2, evaluate_every=1, curve_prompts=4, final_prompts=6, prompts_per_step=4, group_size=2)
EVIDENCE = Path(__file__).parents[1] / "docs" / "evidence"
UNIFORM = (0.5,) * len(MAPS)


def tiny(label: str, merges: tuple[tuple[str, str], ...] = ()) -> AgentSpec:
    return AgentSpec(label, "llama", 16, 16, merges, UNIFORM, warm_start_steps=2)


TINY = Regime(
    "tiny",
    "that all works",
    (
        Seat("a", tiny("a")),
        Seat("b", tiny("b", (("b", "y"),)), joins_at=0.5),
        Seat("c", replace(tiny("c"), architecture="gpt2"), learns=False, flipped=1.0),
    ),
    ("a", "b"),
)


@pytest.fixture(scope="module")
def console() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="module")
def tiny_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tiny regime was run with one seed by a sharing method and a lone one."""
    out = tmp_path_factory.mktemp("study")
    for unit in tiny_units():
        for start in unit.warm_starts.values():
            if not model_folder(out, start).is_dir():
                run_unit(start, out)
        run_unit(unit, out)
    return out


def tiny_runs(variant: str) -> dict[str, Training]:
    return trainings(TINY, VARIANTS[variant], 1e-3, 0, PLAN)


def tiny_units() -> list[Training]:
    return [tiny_runs("hacpo_signed")["a"], *tiny_runs("gspo_x2").values()]


def test_an_interval_is_that_of_a_t_test() -> None:
    values = [0.61, 0.72, 0.58, 0.66, 0.7]
    interval = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = estimate(values)
    assert found.mean == pytest.approx(0.654)
    assert found.half_width is not None
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (interval.low, interval.high)
    )
    # Two values: t(1) at 97.5 % is 12.7062, and sd / sqrt(2) is half of their distance.
    assert estimate([0.0, 1.0]).half_width == pytest.approx(12.7062 / 2, abs=1e-4)
    assert estimate([0.5]).half_width is None


def test_differences_are_paired_by_seed() -> None:
    ours, theirs = {0: 0.5, 1: 0.75, 2: 0.9, 7: 0.0}, {2: 0.8, 1: 0.7, 0: 0.3, 8: 1.0}
    interval = stats.ttest_rel([0.5, 0.75, 0.9], [0.3, 0.7, 0.8]).confidence_interval(0.95)
    found = paired_difference(ours, theirs)
    assert found is not None
    assert found.half_width is not None
    assert found.count == 3
    assert found.mean + found.half_width == pytest.approx(interval.high)
    assert not found.differs_from_zero
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_difference_that_is_certain_is_marked_and_a_single_seed_is_not() -> None:
    certain = paired_difference({0: 0.9, 1: 0.91, 2: 0.89}, {0: 0.1, 1: 0.1, 2: 0.1})
    single = paired_difference({0: 0.9}, {0: 0.1})
    assert certain is not None
    assert single is not None
    assert certain.differs_from_zero
    assert not single.differs_from_zero


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1)), min_size=2, max_size=8))
def test_the_area_is_the_trapezoidal_rule(points: list[tuple[float, float]]) -> None:
    xs = list(itertools.accumulate(width for width, _ in points))
    ys = [height for _, height in points]
    assert mean_height(xs, ys, xs[-1]) == pytest.approx(float(np.trapezoid(ys, xs)) / (xs[-1] - xs[0]))


def test_an_area_needs_ascending_points() -> None:
    assert mean_height([0, 10, 40], [0, 1, 1], 40) == pytest.approx(35 / 40)
    for xs, ys in (([0, 0], [1, 1]), ([0], [1]), ([0, 1], [1])):
        with pytest.raises(ValueError, match="ascend"):
            mean_height(xs, ys, 1)


def test_an_area_can_end_between_points_or_at_one() -> None:
    xs, ys = [0, 10, 40], [0, 1, 0.4]
    assert mean_height(xs, ys, 5) == pytest.approx(0.25)
    assert mean_height(xs, ys, 10) == pytest.approx(0.5)
    assert mean_height(xs, ys, 20) == pytest.approx((5 + 9) / 20)
    for end in (0, 41):
        with pytest.raises(ValueError, match="within"):
            mean_height(xs, ys, end)


def test_two_forms_of_an_answer_are_right_and_no_other() -> None:
    task = tasks.load("digit-maps-two-forms")
    prompt = task.train[0]
    foreign = tasks.foreign_form(prompt.answer)
    assert tasks.foreign_form("by c9: 3>6 9>0 #60") == "c9 3:6 9:0 so 60"
    rewards = [task.verifier.verify(prompt, text).reward for text in (prompt.answer, foreign, foreign[:-1], "")]
    assert rewards == [1, 1, 0, 0]
    assert digit_maps.load().verifier.verify(prompt, foreign).reward == 0
    assert task.held_out == digit_maps.load().held_out
    assert task.digest != digit_maps.load().digest


def test_every_variant_is_a_valid_configuration_with_a_learning_rate() -> None:
    for name, variant in VARIANTS.items():
        algorithm = variant.algorithm(8)
        assert (algorithm.method, algorithm.kl_coef, algorithm.hacpo.eps_low) == (variant.method, 0, 0.01)
        assert learning_rate(variant) > 0, name
    assert VARIANTS["hacpo"].algorithm(8).hacpo.cross_band == "paper"
    assert VARIANTS["hacpo_signed"].algorithm(8).hacpo.cross_band == "signed"
    demo = load(SimulationConfig, Path(__file__).parents[1] / "configs" / "demo.yaml").run.algorithm
    assert VARIANTS["hacpo_advised"].algorithm(8) == demo


def test_a_tie_of_learning_rates_goes_to_the_largest() -> None:
    assert best_rate({1e-4: 0.478, 3e-4: 0.473, 1e-3: 0.38}) == 3e-4
    assert best_rate({1e-4: 0.53, 3e-4: 0.75, 1e-3: 0.81}) == 1e-3
    assert best_rate({1e-4: 0.60, 3e-4: 0.45, 1e-3: 0.2}) == 1e-4


def test_learning_rates_are_the_best_of_the_grid_that_is_on_record() -> None:
    record = json.loads((EVIDENCE / "tuning.json").read_text(encoding="utf-8"))
    grid = {name: {float(lr): score for lr, score in scores.items()} for name, scores in record["grid"].items()}
    assert {name: best_rate(scores) for name, scores in grid.items()} == dict(LEARNING_RATES)
    assert all(tuple(scores) == TUNING_GRID for scores in grid.values())


def test_the_results_on_record_are_of_all_methods_in_all_regimes_with_five_seeds() -> None:
    record = json.loads((EVIDENCE / "results.json").read_text(encoding="utf-8"))
    assert record["learning_rates"] == {name: LEARNING_RATES[name] for name in COMPARED}
    assert record["regimes"].keys() == REGIMES.keys()
    for name, regime in record["regimes"].items():
        assert {variant: len(one["seeds"]) for variant, one in regime["variants"].items()} == dict.fromkeys(COMPARED, 5)
        assert (EVIDENCE / f"{name}.png").exists()


def test_agents_of_a_regime_differ_in_architecture_size_and_tokenizer() -> None:
    for regime in REGIMES.values():
        specs = [seat.spec for seat in regime.seats]
        for kind in ("architecture", "hidden_size", "merges"):
            # Four agents have three sizes and more; each pair differs in the rest.
            assert len({getattr(spec, kind) for spec in specs}) >= min(len(specs), 3), (regime.name, kind)
        assert set(regime.reported) <= {seat.name for seat in regime.seats if seat.learns}


def test_a_lone_run_is_one_for_all_regimes_with_the_same_settings() -> None:
    def lone(regime: str, seat: str, method: str = "gspo_x2") -> str:
        return digest(trainings(REGIMES[regime], VARIANTS[method], 3e-4, 0, PLAN)[seat])

    assert lone("complementary", "a") == lone("late_joiner", "a") == lone("frozen_peer", "learner")
    others = {lone("complementary", "b"), lone("late_joiner", "b"), lone("complementary_fast", "a")}
    assert len({lone("complementary", "a"), lone("complementary", "a", "gspo"), *others}) == 5


def test_a_sharing_run_is_one_for_all_its_agents() -> None:
    runs = trainings(REGIMES["three_agents"], VARIANTS["naive"], 3e-4, 0, PLAN)
    assert len({digest(unit) for unit in runs.values()}) == 1
    assert set(runs) == {"a", "b", "c"}


def test_a_short_run_measures_what_it_should(tiny_study: Path) -> None:
    sharing, lone_a, lone_b = (load_result(tiny_study, unit) for unit in tiny_units())
    assert sharing is not None and lone_a is not None and lone_b is not None
    assert set(sharing["agents"]) == {"a", "b"}, "a frozen peer is not measured"
    steps = {name: [point["step"] for point in agent["curve"]] for name, agent in sharing["agents"].items()}
    assert steps == {"a": [0, 1, 2], "b": [1, 2]}
    rollouts = PLAN.prompts_per_step * PLAN.group_size
    own = {name: [point["own_rollouts"] for point in agent["curve"]] for name, agent in sharing["agents"].items()}
    assert own == {"a": [0, rollouts, 2 * rollouts], "b": [0, rollouts]}
    assert [point["own_rollouts"] for point in lone_a["agents"]["alone"]["curve"]] == [0, 2 * rollouts, 4 * rollouts]
    assert [point["own_rollouts"] for point in lone_b["agents"]["alone"]["curve"]] == [0, 2 * rollouts]
    # All rewards of c are flipped, and it is hardly ever right: so its rollouts have positive advantages.
    assert sharing["agents"]["a"]["live_share_positive"] is not None
    assert sharing["agents"]["a"]["median_ratio"] > 0
    assert lone_a["agents"]["alone"]["median_ratio"] is None
    assert set(sharing["agents"]["a"]["final"]) == {"greedy", "sampled"}


def test_a_run_is_made_by_its_settings_alone(tiny_study: Path, tmp_path: Path) -> None:
    unit = tiny_units()[0]
    for start in unit.warm_starts.values():
        run_unit(start, tmp_path)
    run_unit(unit, tmp_path)
    first, again = load_result(tiny_study, unit), load_result(tmp_path, unit)
    assert first is not None and again is not None
    assert first["agents"] == again["agents"]
    assert load_result(tiny_study, replace(unit, seed=1)) is None


def test_units_that_are_there_are_not_run_again(tiny_study: Path, console: Console) -> None:
    units = tiny_units()
    written = [result_file(tiny_study, unit).stat().st_mtime_ns for unit in units]
    assert run_missing(units, tiny_study, 1, console) == 0
    assert [result_file(tiny_study, unit).stat().st_mtime_ns for unit in units] == written


def test_a_half_written_result_is_run_again_in_a_worker(tiny_study: Path, console: Console) -> None:
    unit = tiny_units()[1]
    file = result_file(tiny_study, unit)
    text = file.read_text(encoding="utf-8")
    file.with_name(file.name + ".new").write_text(text[:40], encoding="utf-8")
    file.write_text(text[:100], encoding="utf-8")
    assert load_result(tiny_study, unit) is None
    assert run_missing(tiny_units(), tiny_study, 1, console) == 1
    assert json.loads(file.read_text(encoding="utf-8"))["result"]["agents"] == json.loads(text)["result"]["agents"]


def test_areas_are_over_all_own_rollouts_and_over_as_many_as_others_spend() -> None:
    points = [
        {"step": step, "own_rollouts": 16.0 * step, "greedy": greedy} for step, greedy in enumerate((0, 0.4, 0.6))
    ]
    rest = dict.fromkeys(("live_share_positive", "median_ratio", "median_rewarded_ratio", "left_out"))
    measured = {"curve": points, "final": {"greedy": 0.6, "sampled": 0.5}, **rest}
    together, alone = {"agents": {"a": measured, "b": measured}}, {"agents": {"alone": measured}}
    shared = outcome(TINY, tiny_runs("naive"), {"a": together, "b": together})
    lone = outcome(TINY, tiny_runs("gspo_x2"), {"a": alone, "b": alone})
    assert (lone.mean["auc"], lone.mean["auc_same_rollouts"]) == (pytest.approx(0.35), pytest.approx(0.2))
    assert shared.mean["auc_same_rollouts"] == shared.mean["auc"] == lone.mean["auc"]


def test_a_regime_is_reported_as_tables_a_plot_and_json(tiny_study: Path, tmp_path: Path) -> None:
    outcomes = {
        variant: {0: outcome_of(TINY, tiny_runs(variant), tiny_study)} for variant in ("hacpo_signed", "gspo_x2")
    }
    console = Console(record=True, width=220, file=io.StringIO())
    print_regime(TINY, outcomes, console)
    text = console.export_text()
    for words in ("hacpo_signed", "final greedy - gspo_x2", "one seed", "b final"):
        assert words in text
    # b joins later, so each agent has a panel of its own.
    plot_regime(TINY, outcomes, tmp_path / "tiny.png")
    assert 1000 < (tmp_path / "tiny.png").stat().st_size < 150_000
    methods = [VARIANTS[variant] for variant in outcomes]
    written = json.loads(json.dumps(as_json([TINY], methods, PLAN, {"tiny": outcomes})))
    variants = written["regimes"]["tiny"]["variants"]
    finals = {variant: data["mean"]["final"]["mean"] for variant, data in variants.items()}
    difference = variants["hacpo_signed"]["difference"]
    assert difference["gspo_x2"]["final"]["mean"] == pytest.approx(finals["hacpo_signed"] - finals["gspo_x2"])
    assert difference["naive"]["final"] is None
    document = as_markdown([TINY], {"tiny": outcomes})
    assert "| [tiny](#tiny) |" in document
    assert f"| gspo_x2 | {finals['gspo_x2']:.2f} |" in document


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("", "name a --regime, or all: complementary,"),
        ("--regime complementry", "there is no regime 'complementry'"),
        ("--regime complementary --methods hacpo,none", "there is no method 'none'"),
        ("--regime complementary --seeds 1,x", "--seeds takes whole numbers"),
        ("--regime complementary --seeds 1,1", "--seeds must differ"),
        ("--regime complementary --seeds -1", "--seeds must differ and be from 0"),
        ("--regime complementary --seeds 5,101", "tuned on, 101 among them"),
        ("--regime all --regime complementry", "there is no regime 'complementry'"),
        ("--tune --regime complementary", "leave --regime, --seeds and --steps out"),
        ("--tune --seeds 7", "leave --regime, --seeds and --steps out"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    arguments: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["learning.py", *arguments.split(), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit_:
        learning.main()
    assert exit_.value.code == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not printed.out
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_used_or_is_in_use_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with locked(tmp_path / "used"):
        for name, sentence in (("file", "cannot be used"), ("used", "another process runs in")):
            arguments = ["learning.py", "--regime", "complementary", "--out", str(tmp_path / name)]
            monkeypatch.setattr("sys.argv", arguments)
            with pytest.raises(SystemExit) as exit_:
                learning.main()
            assert exit_.value.code == 2
            assert sentence in capsys.readouterr().err


def test_a_result_depends_on_all_settings_of_the_algorithm_and_the_optimizer() -> None:
    unit = tiny_units()[0]
    assert unit.settings["algorithm"]["hacpo"]["eps_low"] == 0.01
    assert unit.settings["optimizer"]["lr"] == unit.lr


def test_sharing_beats_twice_the_rollouts_where_agents_are_complementary(tmp_path: Path, console: Console) -> None:
    plan = Plan(steps=14, evaluate_every=14, curve_prompts=10, final_prompts=150)
    variants = [VARIANTS["hacpo_advised"], VARIANTS["gspo_x2"]]
    outcomes = outcomes_of([REGIMES["complementary"]], variants, [0, 1], plan, tmp_path, 2, console)["complementary"]
    gap = difference(outcomes, "hacpo_advised", "gspo_x2", "final")
    assert gap is not None
    assert gap.mean > 0.15
