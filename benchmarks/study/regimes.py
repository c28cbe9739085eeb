"""The regimes: which agents meet, and under which settings. Each says in a line what it tests."""

from dataclasses import dataclass, replace
from typing import Literal

Architecture = Literal["qwen3", "llama", "gpt2", "mistral"]
TaskName = Literal["digit-maps", "digit-maps-two-forms"]

MAPS = "abcdef"


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What an agent is before reinforcement learning. Every model has two layers of four heads.

    Attributes:
        label: for people; it names folders.
        merges: of the BPE tokenizer, beyond characters.
        right: probability of a right demonstration, for each of ``MAPS``.
        warm_start_steps: of 16 demonstrations each.
    """

    label: str
    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    merges: tuple[tuple[str, str], ...]
    right: tuple[float, ...]
    answers_in_foreign_form: bool = False
    warm_start_steps: int = 700

    def __post_init__(self) -> None:
        if len(self.right) != len(MAPS):
            raise ValueError(f"right must hold a probability for each of {MAPS}, not {len(self.right)}")


@dataclass(frozen=True, slots=True)
class Seat:
    """An agent in a regime.

    Attributes:
        learns: a peer that does not is frozen: it only shares.
        joins_at: share of the run's steps that are over when it joins.
        flipped: share of its rewards that the others see flipped, as if their verifiers were that noisy for it.
    """

    name: str
    spec: AgentSpec
    learns: bool = True
    joins_at: float = 0.0
    flipped: float = 0.0


@dataclass(frozen=True, slots=True)
class Regime:
    """Agents and settings.

    Attributes:
        tests: what the regime is for, in a line.
        reported: the seats whose mean accuracy is the regime's.
        lr_factor: times each method's tuned learning rate.
        mini_batches: of a source and step.
    """

    name: str
    tests: str
    seats: tuple[Seat, ...]
    reported: tuple[str, ...]
    lr_factor: float = 1.0
    mini_batches: int = 2
    task: TaskName = "digit-maps"


_DIGITS = "0123456789"
# Four tokenizers that cut the same answers differently: by character, before digits, after digits, and names and arrows.
_BEFORE_DIGITS = (*((">", digit) for digit in _DIGITS), *((" ", digit) for digit in _DIGITS + "#"))
_AFTER_DIGITS = (("b", "y"), ("by", " "), *((digit, " ") for digit in _DIGITS))
_ARROWS = (("b", "y"), (":", " "), (" ", "#"), *((digit, ">") for digit in _DIGITS))


def _knows(maps: str, known: float = 0.35, unfamiliar: float = 0.01) -> tuple[float, ...]:
    return tuple(known if letter in maps else unfamiliar for letter in MAPS)


def _qwen(label: str, right: tuple[float, ...]) -> AgentSpec:
    return AgentSpec(f"qwen3-{label}", "qwen3", 64, 128, (), right)


def _llama(label: str, right: tuple[float, ...]) -> AgentSpec:
    return AgentSpec(f"llama-{label}", "llama", 48, 96, _BEFORE_DIGITS, right)


def _gpt2(label: str, right: tuple[float, ...]) -> AgentSpec:
    return AgentSpec(f"gpt2-{label}", "gpt2", 56, 160, _ARROWS, right)


def _mistral(label: str, right: tuple[float, ...]) -> AgentSpec:
    return AgentSpec(f"mistral-{label}", "mistral", 56, 112, _AFTER_DIGITS, right)


_A = Seat("a", _qwen("abc", _knows("abc")))
_B = Seat("b", _llama("def", _knows("def")))

_WEAK = Seat("learner", _qwen("weak", _knows(MAPS, known=0.10)))
_FOREIGN = Seat("peer", replace(_llama("foreign", _knows(MAPS, known=0.60)), answers_in_foreign_form=True))
_FOREIGN_CALM = Regime(
    "foreign_calm",
    "a weak learner beside a strong peer that answers in a form it never uses: does it keep its own way of answering?",
    (_WEAK, _FOREIGN),
    ("learner",),
    task="digit-maps-two-forms",
)

_LEARNER = Seat("learner", _A.spec)
_FROZEN = Seat("peer", _llama("frozen", _knows(MAPS, known=0.03)), learns=False)

REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime(
            "complementary",
            "each agent knows the half that the other lacks: the case for sharing",
            (_A, _B),
            ("a", "b"),
        ),
        Regime(
            "complementary_fast",
            "the complementary pair at three times each method's tuned learning rate: which method stays stable?",
            (_A, _B),
            ("a", "b"),
            lr_factor=3.0,
        ),
        Regime(
            "strong_weak",
            "one agent is better at everything, and nothing is complementary: does the stronger one lose by sharing?",
            (
                Seat("a", _qwen("strong", _knows(MAPS))),
                Seat("b", _llama("weak", _knows(MAPS, known=0.10))),
            ),
            ("a", "b"),
        ),
        Regime(
            "capability_gap",
            "a strong agent lacks one skill that a far weaker one has: is a weak peer's skill taken up?",
            (
                Seat("a", _qwen("abcde", _knows("abcde", known=0.75))),
                Seat("b", _llama("f", _knows("f", known=0.30))),
            ),
            ("a", "b"),
        ),
        _FOREIGN_CALM,
        replace(
            _FOREIGN_CALM,
            name="foreign_pressure",
            tests="the foreign peer at three times the learning rate, with twice the updates: does its form wreck the learner?",
            lr_factor=3.0,
            mini_batches=4,
        ),
        Regime(
            "three_agents",
            "three architectures that know two maps each",
            (
                Seat("a", _qwen("ab", _knows("ab"))),
                Seat("b", _llama("cd", _knows("cd"))),
                Seat("c", _gpt2("ef", _knows("ef"))),
            ),
            ("a", "b", "c"),
        ),
        Regime(
            "four_agents",
            "four architectures that know one or two maps each",
            (
                Seat("a", _qwen("ab", _knows("ab"))),
                Seat("b", _llama("cd", _knows("cd"))),
                Seat("c", _gpt2("e", _knows("e"))),
                Seat("d", _mistral("f", _knows("f"))),
            ),
            ("a", "b", "c", "d"),
        ),
        Regime(
            "frozen_peer",
            "a peer that never learns and is right 3 % of the time: what does a useless peer cost?",
            (_LEARNER, _FROZEN),
            ("learner",),
        ),
        Regime(
            "frozen_peer_noisy",
            "that peer with half of its rewards flipped: what do wrong rewards cost?",
            (_LEARNER, replace(_FROZEN, flipped=0.5)),
            ("learner",),
        ),
        Regime(
            "late_joiner",
            "the complementary pair, but b joins when half of the steps are over",
            (_A, replace(_B, joins_at=0.5)),
            ("a", "b"),
        ),
    )
}
