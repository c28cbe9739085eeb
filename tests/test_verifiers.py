import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hacrl_fed.config import ReasoningGymTask
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.tasks.registry import load_task
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed.verifiers.extract import extract_answer
from hacrl_fed.verifiers.math import MathVerifier
from hacrl_fed.verifiers.pool import VerifierPool

PROMPT = Prompt("question", "gold")


class AwkwardError(BaseException):
    """Not an Exception, and cannot be unpickled."""

    def __init__(self, *, required: str) -> None:
        super().__init__(f"awkward {required}")


@dataclass(frozen=True)
class MisbehavingVerifier:
    """Does what the completion says."""

    name: ClassVar[str] = "misbehaving"
    isolated: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        pass

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if completion == "hang":
            time.sleep(3600)
        if completion == "spin in C":
            sum(range(10**13))
        if completion == "exit":
            os._exit(7)
        if completion == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "raise":
            raise ZeroDivisionError("by zero")
        if completion == "awkward":
            raise AwkwardError(required="x" * 5000)
        if completion == "modules":
            return Verdict(1.0, " ".join(sys.modules))
        return Verdict(1.0, "fine")


@dataclass(frozen=True)
class BrokenVerifier(MisbehavingVerifier):
    def prepare(self) -> None:
        raise ImportError("its library is not installed")


def test_a_reward_must_be_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        Verdict(float("nan"), "")


@pytest.mark.parametrize(
    "completion, answer",
    [
        ("It is 42.", "42"),
        ("It is 42, or 7.", "7"),
        ("1,234,567 apples", "1234567"),
        ("3.50 dollars.", "3.50"),
        ("-5", "-5"),
        ("x = +5", "5"),
        (".5", ".5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("no number.", None),
        ("", None),
    ],
)
def test_extract_last_number(completion: str, answer: str | None) -> None:
    assert extract_answer(completion, "last_number") == answer


@pytest.mark.parametrize(
    "completion, answer",
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} then \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\{} and {", r"\{"),
        (r"\boxed{a\\}", r"a\\"),
        (r"\boxed{}", ""),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} then \boxed{2", None),
        ("42", None),
    ],
)
def test_extract_boxed(completion: str, answer: str | None) -> None:
    assert extract_answer(completion, "boxed") == answer


@given(st.text("0123456789+-,. x", max_size=30))
@example("+.")
def test_last_number_is_a_number(completion: str) -> None:
    answer = extract_answer(completion, "last_number")
    assert (answer is not None) == any(character.isdigit() for character in completion)
    if answer is not None:
        float(answer)


@given(st.text(), st.sampled_from(["whole", "last_number", "boxed"]))
def test_exact_is_total(completion: str, extract: Any) -> None:
    assert ExactVerifier(extract).verify(PROMPT, completion).reward in (0.0, 1.0)


def test_exact_needs_the_whole_text() -> None:
    verifier = ExactVerifier("whole")
    assert verifier.verify(PROMPT, " gold\n").reward == 1
    assert verifier.verify(PROMPT, "gold, I think").reward == 0
    assert verifier.verify(PROMPT, "").reward == 0


def test_missing_box_is_the_completions_fault() -> None:
    verdict = ExactVerifier("boxed").verify(PROMPT, "gold")
    assert verdict == Verdict(0.0, "no answer found (boxed)")


def test_pool_runs_a_verifier_that_needs_no_process_in_the_callers() -> None:
    with VerifierPool(ExactVerifier("whole"), timeout_s=1, workers=1) as pool:
        rewards = [verdict.reward for verdict in pool.verify_all([(PROMPT, "gold"), (PROMPT, "lead")])]
    assert rewards == [1.0, 0.0]


def test_pool_survives_all_that_a_verifier_may_do() -> None:
    wishes = ["fine", "hang", "exit", "raise", "killed", "awkward", "spin in C", "fine"]
    with VerifierPool(MisbehavingVerifier(), timeout_s=1, workers=2) as pool:
        verdicts = pool.verify_all([(PROMPT, wish) for wish in wishes])
        again = pool.verify_all([(PROMPT, "fine")] * 3)
    by_wish = dict(zip(wishes, verdicts, strict=True))
    assert [verdict.reward for verdict in verdicts] == [1.0, None, None, None, None, None, None, 1.0]
    assert by_wish["hang"].reason == "verifier misbehaving took more than 1 s"
    assert by_wish["spin in C"].reason == "verifier misbehaving took more than 1 s"
    assert by_wish["exit"].reason == "verifier misbehaving crashed with exit code 7"
    assert by_wish["killed"].reason == "verifier misbehaving crashed with exit code -9"
    assert by_wish["raise"].reason == "verifier misbehaving failed: ZeroDivisionError: by zero"
    assert by_wish["awkward"].reason.startswith("verifier misbehaving failed: AwkwardError: awkward xxx")
    assert len(by_wish["awkward"].reason) < 500
    assert [verdict.reward for verdict in again] == [1.0, 1.0, 1.0]


def test_pool_that_lost_its_idle_workers_starts_new_ones() -> None:
    with VerifierPool(MisbehavingVerifier(), timeout_s=5, workers=1) as pool:
        for worker in multiprocessing.active_children():
            worker.kill()
        deadline = time.monotonic() + 60
        verdict = Verdict(None, "")
        while verdict.reward is None and time.monotonic() < deadline:
            (verdict,) = pool.verify_all([(PROMPT, "fine")])
    assert verdict == Verdict(1.0, "fine")


def test_pool_says_when_its_worker_does_not_start() -> None:
    with pytest.raises(HacrlFedError, match="verifier misbehaving: its worker process does not start"):
        VerifierPool(BrokenVerifier(), timeout_s=1, workers=1).__enter__()


def test_pool_can_be_used_from_another_thread_and_worker_has_no_torch() -> None:
    import torch  # noqa: F401  (the parent has it)

    verdicts: list[Verdict] = []

    def work() -> None:
        with VerifierPool(MisbehavingVerifier(), timeout_s=10, workers=1) as pool:
            verdicts.extend(pool.verify_all([(PROMPT, "modules")]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=120)
    (verdict,) = verdicts
    modules = verdict.reason.split()
    assert "hacrl_fed.verifiers.pool" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("module", ["hacrl_fed.verifiers.math", "hacrl_fed.verifiers.reasoning_gym"])
def test_what_workers_import_has_no_torch(module: str) -> None:
    script = f"import sys, {module}, math_verify, reasoning_gym; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


def test_math_verifier_compares_expressions() -> None:
    half = Prompt("half?", "\\frac{1}{2}")
    cases = [
        (half, r"It is \boxed{0.5}.", 1.0),
        (half, r"It is \boxed{2/4}.", 1.0),
        (half, r"\boxed{0.5} no, \boxed{0.25}", 0.0),
        (half, r"It is 0.5.", 0.0),  # no box: the completion's fault
        (half, r"\boxed{???}", 0.0),
        (half, r"\boxed{\frac{1}{}", 0.0),
        (Prompt("x?", "x=3"), r"\boxed{3}", 1.0),
        (Prompt("interval?", "(-\\infty, 3]"), r"\boxed{(-\infty,3]}", 1.0),
        (Prompt("interval?", "(-\\infty, 3]"), r"\boxed{(-\infty,3)}", 0.0),
        (Prompt("broken gold", "???"), r"\boxed{1}", None),
    ]
    with VerifierPool(MathVerifier("boxed"), timeout_s=10, workers=1) as pool:
        verdicts = pool.verify_all([(prompt, completion) for prompt, completion, _ in cases])
    assert [verdict.reward for verdict in verdicts] == [reward for _, _, reward in cases]


def test_math_verifier_that_hangs_is_stopped() -> None:
    tower = Prompt("tower", "10^{10^{10^{10}}}")
    with VerifierPool(MathVerifier("boxed"), timeout_s=2, workers=1) as pool:
        first, second = pool.verify_all([(tower, r"\boxed{9^{9^{9^{9^{9}}}}}"), (Prompt("q", "1"), r"\boxed{1}")])
    assert first.reward in (None, 0.0)
    assert second.reward == 1.0


def test_reasoning_gym_gold_scores_1_and_wrong_less() -> None:
    sums = ReasoningGymTask(kind="reasoning_gym", dataset="chain_sum", size=20, extract="last_number", held_out=0)
    countdown = ReasoningGymTask(kind="reasoning_gym", dataset="countdown", size=5, held_out=0)
    task = load_task("sums", {"sums": sums}, Path())
    with VerifierPool(task.verifier, timeout_s=10, workers=1) as pool:
        right = pool.verify_all([(prompt, f"It is {prompt.answer}.") for prompt in task.train])
        (wrong, none) = pool.verify_all([(task.train[0], "It is 1000001."), (task.train[0], "I do not know")])
    assert [verdict.reward for verdict in right] == [1.0] * 20
    assert wrong.reward is not None and wrong.reward < 0.5
    assert none.reward == 0.0
    # Here the entry's metadata decides, not its answer.
    task = load_task("countdown", {"countdown": countdown}, Path())
    with VerifierPool(task.verifier, timeout_s=10, workers=1) as pool:
        assert {verdict.reward for verdict in pool.verify_all([(p, p.answer) for p in task.train])} == {1.0}
