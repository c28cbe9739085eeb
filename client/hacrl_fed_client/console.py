"""What a person at a site sees: a line for each step, and below it what the site is doing and for whom it waits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from hacrl_fed.config import AlgorithmConfig
from hacrl_fed.status import printable
from hacrl_fed.v1 import session_pb2

_REMEDY_EVERY = 10


class SiteConsole:
    """Prints for one agent. Safe to call from any thread, as rich's console is."""

    def __init__(self, console: Console, agent: str) -> None:
        self._console = console
        self._agent = agent
        self._spinner = console.status(Text(f"{agent}: starting"))
        self._doing = "starting"
        self._run_text = ""
        self._steps = 0
        self._next_remedy: dict[str, int] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Shows the moving line below the others."""
        with self._spinner:
            yield

    def joined(self, steps: int) -> None:
        """Takes the run's number of steps."""
        self._steps = steps

    def tell(self, sentence: str) -> None:
        """Prints a sentence."""
        self._console.print(Text(f"{self._agent}: {printable(sentence)}"))

    def doing(self, step: int, phase: str) -> None:
        """Sets what the site is doing."""
        self._doing = f"step {min(step + 1, self._steps)}/{self._steps}: {phase}" if self._steps else phase
        self._show()

    def status(self, status: session_pb2.Status) -> None:
        """Sets what the run is doing."""
        self._run_text = printable(status.text)
        self._show()

    def evaluated(self, when: str, accuracies: dict[str, float]) -> None:
        """Prints held-out accuracies."""
        text = ", ".join(f"{mode} {accuracy:.3f}" for mode, accuracy in accuracies.items()) or "no held-out prompts"
        self.tell(f"held-out accuracy {when} training: {text}")

    def stepped(self, step: int, metrics: dict[str, float]) -> None:
        """Prints a step that is done."""
        reward = f"reward {metrics['reward_mean']:.3f}, " if "reward_mean" in metrics else ""
        self.tell(
            f"step {step + 1}/{self._steps}: {reward}{metrics.get('own_rollouts', 0):.0f} own and "
            f"{metrics.get('cross_rollouts', 0):.0f} cross rollouts, {metrics.get('updates_made', 0):.0f} updates, "
            f"{metrics.get('rollout_s', 0) + metrics.get('update_s', 0):.1f} s"
        )

    def few_live(self, step: int, share: float, algorithm: AlgorithmConfig) -> None:
        """Warns, with the remedy, now and then."""
        remedy = "set algorithm.hacpo.cross_band to signed and alpha to 0, or lower cross_clip_low"
        if algorithm.method != "hacpo":
            remedy = "take algorithm.method hacpo with cross_band signed and alpha 0"
        elif algorithm.hacpo.cross_band == "signed":
            floor = algorithm.hacpo.positive_floor
            remedy = f"lower algorithm.hacpo.positive_floor ({floor}), or look at what the others answer"
        self._warn("few live", step, f"only {share:.0%} of the others' correct rollouts carry gradient; {remedy}")

    def foreign(self, step: int, medians: Mapping[str, float], algorithm: AlgorithmConfig) -> None:
        """Warns, with the remedy, now and then. ``medians`` are the ratios of the sources that were left out."""
        names = ", ".join(f"{source} (median ratio {median:.2g})" for source, median in sorted(medians.items()))
        self._warn(
            "foreign",
            step,
            f"the rollouts of {names} are left out of this step, since this model would hardly ever answer so "
            f"(algorithm.hacpo.source_floor is {algorithm.hacpo.source_floor}); agree on a form of answers in the prompt",
        )

    def _warn(self, kind: str, step: int, warning: str) -> None:
        if step >= self._next_remedy.get(kind, 0):
            self._next_remedy[kind] = step + _REMEDY_EVERY
            self.tell(f"warning: {warning}")

    def _show(self) -> None:
        self._spinner.update(Text(f"{self._agent}: {self._doing}" + (f" · {self._run_text}" if self._run_text else "")))
