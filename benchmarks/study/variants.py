"""The method variants that the study compares, each as a method with settings of its own, and their learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hacrl_fed.config import SHARING_METHODS, AlgorithmConfig, parse

Setting = float | bool | str

# Small models move far in an update: the paper's clip range of 3e-4 would clip a third of the gradients.
_ALL: Mapping[str, Setting] = {"eps_low": 0.01, "eps_high": 0.01}


@dataclass(frozen=True, slots=True)
class Variant:
    """A method and what it sets of ``HacpoConfig`` beyond the defaults.

    Attributes:
        tuned_as: the variant whose learning rate it takes.
    """

    name: str
    method: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    tuned_as: str = ""

    @property
    def shares(self) -> bool:
        return self.method in SHARING_METHODS

    def algorithm(self, prompts_per_mini_batch: int) -> AlgorithmConfig:
        """The configuration of a run. Raises UserError where this version knows no such method or setting."""
        data = {
            "method": self.method,
            "hacpo": {**_ALL, **self.settings},
            "kl_coef": 0,
            "prompts_per_mini_batch": prompts_per_mini_batch,
        }
        return parse(AlgorithmConfig, data, source=f"variant {self.name}")


COMPARED = ("hacpo_advised", "hacpo_signed", "hacpo", "gspo", "gspo_x2", "grpo", "naive", "naive_own", "sapo")

_SIGNED: Mapping[str, Setting] = {"cross_band": "signed", "alpha": 0.0}
_FLOOR: Mapping[str, Setting] = {"source_floor": 0.05}
_BOUND: Mapping[str, Setting] = {"ratio_min": 1.0}


def _ablation(name: str, **settings: Setting) -> Variant:
    return Variant(f"hacpo_{name}", "hacpo", settings, tuned_as="hacpo")


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        # What to start with, where agents differ; without both, or one, of its safeguards; and the paper's.
        Variant("hacpo_advised", "hacpo", {**_SIGNED, **_FLOOR, **_BOUND}),
        Variant("hacpo_signed", "hacpo", _SIGNED),
        Variant("hacpo_signed_floor", "hacpo", {**_SIGNED, **_FLOOR}, tuned_as="hacpo_advised"),
        Variant("hacpo_signed_bound", "hacpo", {**_SIGNED, **_BOUND}, tuned_as="hacpo_advised"),
        Variant("hacpo", "hacpo"),
        Variant("naive_floor", "naive", _FLOOR, tuned_as="naive"),
        *(Variant(name, name) for name in COMPARED if not name.startswith("hacpo")),
        *(_ablation(f"alpha{alpha}", alpha=float(alpha)) for alpha in (0, 2, 3)),
        _ablation("low50", cross_clip_low=0.5),
        _ablation("unweighted_baseline", capability_baseline=False),
        _ablation("unweighted_gradient", capability_on_gradient=False),
        _ablation("unclipped", cross_clip=False),
        _ablation("fixed_clip", cross_clip_step=0.0),
    )
}

TUNING_GRID = (1e-4, 3e-4, 1e-3)
TUNING_SEEDS = (100, 101)

# The best of the grid with the tuning seeds, by --tune: docs/evidence/tuning.json.
LEARNING_RATES: Mapping[str, float] = {**dict.fromkeys(COMPARED, 3e-4), "hacpo_signed": 1e-3}


def learning_rate(variant: Variant) -> float:
    """The tuned learning rate."""
    return LEARNING_RATES[variant.tuned_as or variant.name]
