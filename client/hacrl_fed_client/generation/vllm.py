"""Generation with vLLM, in this process: before each generation the policy's weights are handed over in memory.

The weights pass by vLLM's ``reload_weights``, LoRA merged into them: that takes every architecture and target module that
vLLM loads, and decodes as fast as without LoRA, which vLLM's own adapters do not. Since they pass every time, there is
nothing to keep in step with the policy, and the engine can discard them while the policy trains.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed_client.checkpoint import capture_random_state, restore_random_state
from hacrl_fed_client.generation.base import Completion, check_length, cut_at_end
from hacrl_fed_client.policy import NOT_FINITE, Policy

# Read by vLLM when it is imported; what the user has set stays.
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    # Else all threads of this process, those of the training too, are bound to cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

# What vLLM raises for a model that it cannot run.
_ENGINE_ERRORS = (ValueError, RuntimeError, LookupError, ImportError, AttributeError, TypeError)


class VllmGenerator:
    """Generates at most ``rows`` completions at once, as many of them as fit the engine's memory. See `Generator`.

    On GPUs the engine sleeps between generations, without weights and cache, so that training has the memory.
    """

    def __init__(
        self,
        policy: Policy,
        rows: int,
        memory_share: float,
        dtype: Literal["float32", "bfloat16"],
        check: Callable[[], None],
    ) -> None:
        """Starts the engine.

        ``memory_share`` of the device's memory is for the engine while it is awake, in [0, 1]. ``dtype`` is of its arithmetic
        and weights. ``check`` is called before each token; what it raises ends the generation. Raises UserError where vLLM is
        missing, or cannot run this policy here.
        """
        self._policy = policy
        self._check = check
        self._eos_ids = frozenset(policy.eos_ids)
        self._sleeps = policy.device.type == "cuda"
        self._vllm = _import_vllm()
        # vLLM seeds every random state, and takes one thread where it sees no OMP_NUM_THREADS.
        random_state = capture_random_state()
        threads, set_threads = torch.get_num_threads(), torch.set_num_threads
        try:
            self._engine = self._start(rows, memory_share, dtype)
            self._sleep()
            # Weights that vLLM cannot load and layers that its kernels do not take are found out now.
            list(self._groups([[0]], samples=1, max_new_tokens=1, greedy=True, seeds=[0]))
        except _ENGINE_ERRORS as error:
            raise UserError(
                f"vLLM cannot run {policy.name}: {' '.join(str(error).split())[:300]}; set generation_backend to hf, or, "
                "where it is short of memory, another vllm_memory_share"
            ) from error
        finally:
            restore_random_state(random_state)
            set_threads(threads)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        *,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        """See `Generator.generate`; to be called when an earlier generation has ended, or was given up.

        Raises UserError where a completion would not fit the model's context or the engine's memory, and HacrlFedError
        where the model's log-probs are not finite.
        """
        assert len(seeds) == len(prompts)
        check_length(prompts, max_new_tokens, self._policy.context_length)
        check_length(
            prompts, max_new_tokens, self._engine.model_config.max_model_len, remedy=", or raise vllm_memory_share"
        )
        return self._groups(prompts, samples, max_new_tokens, greedy, seeds)

    def _groups(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        assert not self._engine.has_unfinished_requests(), "the generation before has not ended"
        self._wake()
        unfinished = [str(number) for number in range(len(prompts))]
        done: dict[str, list[Completion]] = {}
        try:
            for number, prompt, seed in zip(unfinished, prompts, seeds, strict=True):
                # Of likeliest tokens one completion is all that vLLM gives.
                count = 1 if greedy else samples
                parameters = self._parameters(count, max_new_tokens, greedy, seed)
                self._engine.add_request(number, self._vllm.inputs.tokens_input(list(prompt)), parameters)
            while unfinished:
                self._check()
                for output in self._stepped():
                    completions = [self._completion(each) for each in output.outputs]
                    done[output.request_id] = completions * samples if greedy else completions
                while unfinished and unfinished[0] in done:
                    yield done.pop(unfinished.pop(0))
        finally:
            self._engine.abort_request([number for number in unfinished if number not in done])
            self._sleep()

    def _start(self, rows: int, memory_share: float, dtype: str) -> Any:
        policy, platform = self._policy, self._vllm.platforms.current_platform
        if policy.device.type != platform.device_type or policy.device.index:
            raise UserError(
                f"this vLLM generates on the first device of the kind {platform.device_type}, and the policy is on "
                f"{policy.device}: set device to it, hide other GPUs by CUDA_VISIBLE_DEVICES, or set generation_backend to hf"
            )
        arguments = self._vllm.EngineArgs(
            model=policy.name,
            load_format="dummy",
            dtype=dtype,
            skip_tokenizer_init=True,
            generation_config="vllm",  # the model repository's sampling settings must not reach a rollout
            max_model_len=-1,  # what fits the memory, up to the model's context
            max_num_seqs=rows,
            gpu_memory_utilization=memory_share,
            enforce_eager=policy.device.type == "cpu",  # compiling takes longer than it gains there
            enable_sleep_mode=self._sleeps,
            disable_log_stats=True,
        )
        return self._vllm.LLMEngine.from_engine_args(arguments)

    def _parameters(self, count: int, max_new_tokens: int, greedy: bool, seed: int) -> Any:
        return self._vllm.SamplingParams(
            n=count,
            temperature=0.0 if greedy else 1.0,
            # vLLM gives sample i the seed + i, and takes less than 2^63. Without a seed numpy's state would be read.
            seed=seed >> 2,
            max_tokens=max_new_tokens,
            ignore_eos=True,  # of the model's configuration: the policy's own end it
            stop_token_ids=list(self._policy.eos_ids),
            logprobs=0,
            detokenize=False,
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
        )

    def _stepped(self) -> list[Any]:
        """What has ended with one more token of each completion that is being generated."""
        # vLLM draws from the common random state too, and then draws anew by the seeds.
        with torch.random.fork_rng(devices=[self._policy.device] if self._sleeps else []):
            ended: list[Any] = self._engine.step()
        return ended

    def _completion(self, output: Any) -> Completion:
        if not math.isfinite(output.cumulative_logprob):
            raise HacrlFedError(NOT_FINITE)
        # Of the sum no more than the mean is used.
        logps = [output.cumulative_logprob / len(output.token_ids)] * len(output.token_ids)
        completion = cut_at_end(output.token_ids, logps, self._eos_ids)
        assert completion.finish_reason.value == output.finish_reason, f"vLLM ended by {output.finish_reason}"
        return completion

    def _wake(self) -> None:
        if self._sleeps:
            torch.cuda.empty_cache()  # the engine's memory is not torch's
            self._engine.wake_up(tags=["weights"])
        weights = iter(self._policy.merged_weights().items())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._sleeps:
            self._engine.wake_up(tags=["kv_cache"])
        emptied = self._engine.reset_prefix_cache()  # what it holds is of the weights before
        assert emptied, "blocks of the prefix cache are in use"

    def _sleep(self) -> None:
        if self._sleeps:
            self._engine.sleep(level=2)


def _import_vllm() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # In another process it could not be handed tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        import vllm
        import vllm.inputs
        import vllm.platforms
        import vllm.sampling_params
    except ImportError as error:
        raise UserError(
            f"generation_backend vllm cannot be used here ({error}): pip install vllm into this environment, best one of its "
            "own, or set generation_backend to hf"
        ) from error
    return vllm
