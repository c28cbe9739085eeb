"""The generation backend that the site's settings name."""

from collections.abc import Callable

from hacrl_fed.config import SiteConfig
from hacrl_fed_client.generation.base import Generator
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.generation.vllm import VllmGenerator
from hacrl_fed_client.policy import Policy


def build_generator(policy: Policy, config: SiteConfig, check: Callable[[], None]) -> Generator:
    """The generator of a policy on one device. ``check`` as in `HfGenerator`.

    Raises UserError where vLLM is asked for and is missing, or cannot run the policy.
    """
    if config.generation_backend == "vllm":
        return VllmGenerator(policy, config.generation_rows, config.vllm_memory_share, config.dtype, check)
    return HfGenerator(policy, config.generation_rows, check)
