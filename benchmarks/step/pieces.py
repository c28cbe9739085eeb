"""A process that measures the pieces of a site's step where it learns alone, and the machine."""

from multiprocessing.connection import Connection

import transformers

from hacrl_fed.config import MethodName
from hacrl_fed.tasks.base import Prompt
from step.measuring import Meter, measure_machine
from step.ours import SiteStep, site_config
from step.workloads import SAMPLES, Workload


def serve(
    connection: Connection, folder: str, workload: Workload, texts: list[str], steps: int, method: MethodName
) -> None:
    """Tells the machine's speed; then of each step what generating, rolling out (generating again) and learning cost."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    connection.send(measure_machine("cpu", "float32"))
    site = SiteStep(folder, workload, site_config("cpu", "float32"), method)
    meter = Meter("cpu")
    for step in range(steps):
        prompts = [Prompt(text, "-") for text in texts[step * workload.prompts : (step + 1) * workload.prompts]]
        prompt_ids = [site.policy.render_prompt(prompt.text) for prompt in prompts]
        meter.start()
        groups = site.generator.generate(
            prompt_ids, SAMPLES, workload.max_new_tokens, greedy=False, seeds=range(step, step + len(prompts))
        )
        connection.send(meter.stop([len(each.token_ids) for group in groups for each in group]))
        meter.start()
        rollouts = [rollout for group in site.roll_out(prompts, step) for rollout in group]
        lengths = [len(rollout.completion_ids) for rollout in rollouts]
        connection.send(meter.stop(lengths))
        meter.start()
        site.learn(rollouts, step)
        connection.send(meter.stop(lengths))
