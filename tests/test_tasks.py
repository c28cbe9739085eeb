import hashlib
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_fed.config import JsonLinesTask, ReasoningGymTask
from hacrl_fed.errors import UserError
from hacrl_fed.tasks import digit_maps
from hacrl_fed.tasks.base import Prompt, build_task
from hacrl_fed.tasks.registry import load_task
from hacrl_fed.tasks.schedule import step_prompts
from hacrl_fed.verifiers.exact import ExactVerifier

HERE = Path()
PROMPTS = tuple(Prompt(f"question {index}", f"answer {index}") for index in range(200))


def write_jsonl(path: Path, entries: list[dict[str, object]]) -> JsonLinesTask:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return JsonLinesTask(kind="jsonl", path=path)


def load_lines(tmp_path: Path, *lines: str, **settings: object) -> object:
    (tmp_path / "task.jsonl").write_text("\n".join(lines), encoding="utf-8")
    definition = JsonLinesTask(kind="jsonl", path=Path("task.jsonl"), **settings)
    return load_task("t", {"t": definition}, tmp_path)


def test_prompt_id_is_the_documented_hash() -> None:
    assert Prompt("1+1=", "2").id == hashlib.sha256(b'["1+1=","2"]').hexdigest()


@given(st.text(min_size=1), st.text(), st.text(min_size=1), st.text())
def test_prompt_ids_are_equal_only_for_equal_content(text: str, answer: str, text2: str, answer2: str) -> None:
    assert (Prompt(text, answer).id == Prompt(text2, answer2).id) == ((text, answer) == (text2, answer2))


def test_prompt_id_keeps_text_and_answer_apart() -> None:
    assert Prompt('a","b', "c").id != Prompt("a", 'b","c').id


@pytest.mark.parametrize("text, answer", [("", "1"), ("\ud800", "1"), ("q", "\udfff")])
def test_prompt_refuses_what_is_no_text(text: str, answer: str) -> None:
    with pytest.raises(ValueError, match=r"prompt is empty|lone surrogate"):
        Prompt(text, answer)


def test_task_is_the_same_in_any_order_and_with_duplicates() -> None:
    prompts = [*PROMPTS, *(Prompt(prompt.text, "another answer") for prompt in PROMPTS[:20])]
    task = build_task("t", prompts, 0.3, ExactVerifier("whole"))
    other = build_task("t", [*reversed(prompts), *PROMPTS[:7]], 0.3, ExactVerifier("whole"))
    assert (task.train, task.held_out, task.digest) == (other.train, other.held_out, other.digest)
    assert len(task.train) + len(task.held_out) == len(PROMPTS)


def test_task_digest_depends_on_all_that_matters() -> None:
    def digest(
        task_id: str = "t", prompts: tuple[Prompt, ...] = PROMPTS, held_out: float = 0.3, extract: str = "whole"
    ) -> str:
        return build_task(task_id, prompts, held_out, ExactVerifier(extract)).digest

    digests = {
        digest(),
        digest(task_id="u"),
        digest(prompts=PROMPTS[1:]),
        digest(prompts=(Prompt("question 0", "other"), *PROMPTS[1:])),
        digest(held_out=0.5),
        digest(extract="boxed"),
    }
    assert len(digests) == 6


@given(st.lists(st.tuples(st.text("abc", min_size=1, max_size=3), st.text("01", max_size=1)), min_size=1))
def test_no_text_is_both_trained_on_and_held_out(pairs: list[tuple[str, str]]) -> None:
    prompts = [Prompt(text, answer) for text, answer in pairs]
    try:
        task = build_task("t", prompts, 0.5, ExactVerifier("whole"))
    except UserError:
        return  # all are held out
    texts = [prompt.text for prompt in task.train + task.held_out]
    assert sorted(texts) == sorted({text for text, _ in pairs})


def test_held_out_share_is_about_what_was_asked_for() -> None:
    task = build_task("t", PROMPTS, 0.3, ExactVerifier("whole"))
    assert 40 <= len(task.held_out) <= 80
    assert not build_task("t", PROMPTS, 0.0, ExactVerifier("whole")).held_out


def test_task_without_training_prompts_is_refused() -> None:
    with pytest.raises(UserError, match="t has no prompt to train on"):
        build_task("t", [], 0.1, ExactVerifier("whole"))


def test_schedule_is_fully_specified() -> None:
    def key(prompt: Prompt, epoch: int) -> str:
        return hashlib.sha256(f"7:{epoch}:{prompt.id}".encode()).hexdigest()

    first_epoch = sorted(PROMPTS, key=lambda prompt: key(prompt, 0))
    second_epoch = sorted(PROMPTS, key=lambda prompt: key(prompt, 1))
    assert list(step_prompts(PROMPTS, 30, seed=7, step=1)) == first_epoch[30:60]
    assert list(step_prompts(PROMPTS, 30, seed=7, step=7)) == second_epoch[30:60]  # 6 steps an epoch


@given(st.integers(1, 200), st.integers(0, 50), st.integers())
def test_an_epoch_has_each_prompt_at_most_once(prompts_per_step: int, epoch: int, seed: int) -> None:
    steps = len(PROMPTS) // prompts_per_step
    last = steps - 1
    drawn = [p for step in {0, last} for p in step_prompts(PROMPTS, prompts_per_step, seed, epoch * steps + step)]
    assert len(set(drawn)) == len(drawn) == prompts_per_step * len({0, last})


def test_schedule_does_not_depend_on_the_order_of_the_prompts() -> None:
    assert step_prompts(PROMPTS, 16, 0, 5) == step_prompts(PROMPTS[::-1], 16, 0, 5)


def test_step_larger_than_the_task_is_refused() -> None:
    with pytest.raises(UserError, match="takes 201 prompts, but the task has 200"):
        step_prompts(PROMPTS, 201, 0, 0)


def test_digit_maps_is_the_same_everywhere() -> None:
    task = load_task("digit-maps", {}, HERE)
    assert task.digest == "40d1e9210be3539581f6d0f9620c3fddc3f4de1d812fd9982379bb5d3a2b0d46"
    assert len(task.train) > 5000
    assert len(task.held_out) > 500
    assert {len(prompt.text) for prompt in task.train} == {7, 8}


@pytest.mark.parametrize(
    "text, answer",
    [
        ("a 0789:", "by a3: 0>3 7>0 8>1 9>2 #3012"),
        ("b 0345:", "by b7: 0>7 3>0 4>1 5>2 #7012"),
        ("c 3926:", "by c9: 3>6 9>0 2>7 6>3 #6073"),
        ("d 0456:", "by d2: 0>0 4>8 5>0 6>2 #0802"),
        ("e 03479:", "by e2: 0>0 3>9 4>6 7>9 9>1 #09691"),
        ("f 0456:", "by f5: 0>5 4>9 5>0 6>1 #5901"),
    ],
)
def test_digit_maps_gold_answers(text: str, answer: str) -> None:
    assert digit_maps.gold_answer(text) == answer


def test_unknown_task_names_what_the_site_knows_and_how_to_define_it() -> None:
    mine = ReasoningGymTask(kind="reasoning_gym", dataset="chain_sum")
    with pytest.raises(
        UserError, match=r"does not know the task gsm \(it knows digit-maps, mine\).*site\.yaml.*tasks:"
    ):
        load_task("gsm", {"mine": mine}, HERE)


def test_a_site_may_define_a_built_in_id_itself(tmp_path: Path) -> None:
    definition = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "q", "answer": "a"}])
    assert [prompt.text for prompt in load_task("digit-maps", {"digit-maps": definition}, HERE).train] == ["q"]


def test_jsonl_digest_depends_on_content_only(tmp_path: Path) -> None:
    entries: list[dict[str, object]] = [{"prompt": f"q{index}", "answer": index, "note": "n"} for index in range(50)]
    one = load_task("t", {"t": write_jsonl(tmp_path / "one.jsonl", entries)}, HERE)
    renamed = [{"answer": str(entry["answer"]), "prompt": entry["prompt"]} for entry in reversed(entries)]
    two = load_task("t", {"t": write_jsonl(tmp_path / "two.jsonl", renamed)}, HERE)
    assert one.digest == two.digest


def test_jsonl_path_is_relative_to_the_site_file_and_fields_can_be_named(tmp_path: Path) -> None:
    task = load_lines(tmp_path, '{"q": "1+1", "a": 2}', prompt_field="q", answer_field="a", held_out=0)
    assert [(prompt.text, prompt.answer) for prompt in task.train] == [("1+1", "2")]


def test_jsonl_numbers_stay_as_written(tmp_path: Path) -> None:
    task = load_lines(tmp_path, '{"prompt": "p", "answer": 0.10}')
    assert task.train[0].answer == "0.10"


@pytest.mark.parametrize(
    "lines, message",
    [
        ([""], r"task\.jsonl is empty"),
        (['{"prompt": "p", "answer": "a"}', "", "{prompt: 1}"], r"task\.jsonl, line 3 is not JSON"),
        (["[" * 100_000], r"line 1 is not JSON"),
        (["[1]"], r"line 1 must hold an object, not list"),
        (['{"prompt": "p", "anwser": "a"}'], r"line 1 has no field 'answer'; it has 'prompt', 'anwser'"),
        (['{"prompt": "p", "answer": null}'], r"line 1: field 'answer' must be a string or a number, not NoneType"),
        (['{"prompt": "p", "answer": NaN}'], r"line 1: field 'answer' must be a string or a number, not float"),
        (['{"prompt": "", "answer": "a"}'], r"line 1: the prompt is empty"),
        (['{"prompt": "p", "answer": "\\ud800"}'], r"line 1: the answer holds a lone surrogate"),
    ],
)
def test_jsonl_faults_name_file_and_line(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_lines(tmp_path, *lines)


def test_jsonl_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9", "answer": "a"}')
    with pytest.raises(UserError, match="there is no task file"):
        load_task("t", {"t": JsonLinesTask(kind="jsonl", path=tmp_path / "absent.jsonl")}, HERE)
    with pytest.raises(UserError, match="cannot be read"):
        load_task("t", {"t": JsonLinesTask(kind="jsonl", path=tmp_path / "latin.jsonl")}, HERE)


def test_math_gold_that_cannot_be_read_is_skipped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    golds = ["\\frac{1}{2}", "???", "3", "\\frac{1}{", ""]
    lines = [json.dumps({"prompt": f"q{index}", "answer": gold}) for index, gold in enumerate(golds)]
    with caplog.at_level(logging.WARNING):
        task = load_lines(tmp_path, *lines, verifier="math", held_out=0)
    assert sorted(prompt.answer for prompt in task.train) == ["3", "\\frac{1}{2}"]
    (record,) = caplog.records
    assert "skipped 3 of 5 prompts" in record.getMessage()


def test_reasoning_gym_task_is_deterministic_without_duplicates() -> None:
    definition = ReasoningGymTask(
        kind="reasoning_gym", dataset="chain_sum", params={"max_terms": 2, "max_digits": 1}, size=60
    )
    task = load_task("sums", {"sums": definition}, HERE)
    texts = [prompt.text for prompt in task.train + task.held_out]
    assert len(set(texts)) == len(texts) < 60
    assert load_task("sums", {"sums": definition}, HERE).digest == task.digest
    other = definition.model_copy(update={"seed": 1000})
    assert load_task("sums", {"sums": other}, HERE).digest != task.digest


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"dataset": "chain_sun"}, "no data set 'chain_sun'; did you mean chain_sum"),
        ({"dataset": "chain_sum", "params": {"min_term": 2}}, "no parameter 'min_term'; did you mean min_terms"),
        ({"dataset": "chain_sum", "params": {"size": 2}}, "no parameter 'size'"),
        ({"dataset": "chain_sum", "params": {"min_terms": 0}}, "refuses its parameters: min_terms must be positive"),
        ({"dataset": "chain_sum", "params": {"min_terms": "two"}}, "refuses its parameters"),
    ],
)
def test_reasoning_gym_faults_are_told(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_task("t", {"t": ReasoningGymTask(kind="reasoning_gym", **settings)}, HERE)
