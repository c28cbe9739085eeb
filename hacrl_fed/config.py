"""Configuration: typed, frozen, unknown keys refused with the nearest known one. Defaults of training are the paper's.

``RunConfig`` is the run's (run.yaml): it reaches the sites when they join, and nothing in it can make a site load code
or read a file. ``SiteConfig`` is the site's own (site.yaml), and wins.
"""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hacrl_fed.algorithms.config import HacpoConfig
from hacrl_fed.errors import UserError
from hacrl_fed.records import check_digest, check_name

MethodName = Literal["hacpo", "gspo", "gspo_x2", "grpo", "naive", "naive_own", "sapo"]
METHOD_NAMES: tuple[str, ...] = get_args(MethodName)
SHARING_METHODS = frozenset({"hacpo", "naive", "naive_own", "sapo"})

Seconds = Annotated[float, Field(gt=0)]


class StrictModel(BaseModel):
    """What a person writes in a file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class AlgorithmConfig(StrictModel):
    """How rollouts become updates. ``prompts_per_mini_batch`` counts prompts of one source."""

    method: MethodName = "hacpo"
    hacpo: HacpoConfig = HacpoConfig()
    kl_coef: float = Field(0.001, ge=0)
    prompts_per_mini_batch: int = Field(64, ge=1)


class Deadlines(StrictModel):
    """How long the coordinator waits, in seconds.

    Attributes:
        join_s: for the whole roster, before the run starts with at least ``min_agents``.
        step_s: for a step's rollouts, from its opening with enough agents present.
        rejoin_s: for an agent whose stream broke, before the step goes on without it.
        heartbeat_s: without a sign of life before an agent counts as lost.
        pause_s: with fewer than ``min_agents`` present, before the server gives up (it can be resumed).
    """

    join_s: Seconds = 600
    step_s: Seconds = 3600
    rejoin_s: Seconds = 10
    heartbeat_s: Seconds = 30
    pause_s: Seconds = 86400


class WireLimits(StrictModel):
    """What a chunk and a step may weigh; more is refused, by name. Sizes hold after decompression."""

    chunk_bytes: int = Field(1 << 20, ge=1024, le=1 << 30)
    text_bytes: int = Field(1 << 16, ge=1)
    rollouts_per_step: int = Field(1 << 17, ge=1)
    chunks_per_step: int = Field(1 << 14, ge=1)
    chunks_in_flight: int = Field(16, ge=1)


class Evaluation(StrictModel):
    """Held-out accuracy before and after: ``prompts`` of the task's held-out prompts, 0 for none; one sample a prompt."""

    prompts: int = Field(200, ge=0)


class TaskRef(StrictModel):
    """A task by its id, and by its digest where the run pins it (else the first agent to join does)."""

    id: str
    digest: str | None = None

    @field_validator("id")
    @classmethod
    def _check_id(cls, value: str) -> str:
        check_name("task id", value)
        return value

    @field_validator("digest")
    @classmethod
    def _check_digest(cls, value: str | None) -> str | None:
        if value is not None:
            check_digest("task digest", value)
        return value


class RunConfig(StrictModel):
    """What all agents of a run do alike."""

    task: TaskRef
    steps: int = Field(ge=1)
    seed: int = Field(0, ge=0, lt=1 << 32)
    prompts_per_step: int = Field(128, ge=1)
    group_size: int = Field(8, ge=2)
    max_prompt_tokens: int = Field(1024, ge=1)
    max_new_tokens: int = Field(4096, ge=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    evaluation: Evaluation = Evaluation()
    min_agents: int = Field(2, ge=1)
    block_steps: int = Field(10, ge=1)
    deadlines: Deadlines = Deadlines()
    limits: WireLimits = WireLimits()

    @property
    def rollouts_per_agent(self) -> int:
        """Rollouts of a step that an agent may publish."""
        return min(self.limits.rollouts_per_step, self.prompts_per_step * self.group_size)

    @property
    def chunks_per_agent(self) -> int:
        """Chunks of a step that an agent may publish: each holds a group at least, but for a last one without any."""
        return min(self.limits.chunks_per_step, self.prompts_per_step + 1)

    def message_bytes(self, agents: int) -> int:
        """The largest payload of a message: a chunk's body, or a manifest that lists every chunk of every agent."""
        return max(self.limits.chunk_bytes, agents * (200 + 70 * self.chunks_per_agent))

    @field_validator("task", mode="before")
    @classmethod
    def _task_by_name(cls, value: object) -> object:
        return {"id": value} if isinstance(value, str) else value


class Optimizer(StrictModel):
    """AdamW, constant learning rate after a linear warm-up."""

    lr: float = Field(1e-6, gt=0)
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(10, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)


class Lora(StrictModel):
    """Low-rank adapters by peft; the reference policy is then the model with the adapter off."""

    r: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = "all-linear"


Extract = Literal["whole", "last_number", "boxed"]


class JsonLinesTask(StrictModel):
    """A task from a JSON-lines file: an object a line, with a prompt and its gold answer.

    Attributes:
        path: the file, relative to the site.yaml that names it.
        verifier: "exact" (string equality after stripping white space) or "math" (math-verify).
        extract: what of a completion is taken as its answer.
        held_out: share of the prompts kept for evaluation, chosen by their hash.
    """

    kind: Literal["jsonl"]
    path: Path
    prompt_field: str = "prompt"
    answer_field: str = "answer"
    verifier: Literal["exact", "math"] = "exact"
    extract: Extract = "whole"
    held_out: float = Field(0.1, ge=0, lt=1)


class ReasoningGymTask(StrictModel):
    """A procedural task of reasoning-gym, which also verifies it.

    Attributes:
        dataset: its name in reasoning-gym, such as chain_sum.
        params: the generator's own settings, such as min_terms.
        size: prompts to generate; duplicates are dropped.
    """

    kind: Literal["reasoning_gym"]
    dataset: str
    params: dict[str, bool | int | float | str] = {}
    size: int = Field(1000, ge=1)
    seed: int = 0
    extract: Extract = "whole"
    held_out: float = Field(0.1, ge=0, lt=1)


TaskDefinition = Annotated[JsonLinesTask | ReasoningGymTask, Field(discriminator="kind")]


class SiteLimits(StrictModel):
    """The site's own limits."""

    egress_bytes_per_step: int = Field(256 << 20, ge=1024)


class SiteConfig(StrictModel):
    """What a site decides for itself.

    Attributes:
        devices: how many devices of the kind of ``device`` train together; without it all GPUs that there are, or the CPU.
        algorithm: overrides of the run's ``algorithm`` section, key by key.
        tasks: the site's own definitions of task ids, beside the built-in ones.
        micro_batch_tokens: tokens of a forward and backward pass, padding included; without it 2048 on a CPU, and 16384
            elsewhere. The loss does not depend on it.
        generation_rows: completions generated at once; each batch is published while the next is generated.
        generation_backend: "hf" (the site's own loop, with any model) or "vllm" (which is installed apart).
        vllm_memory_share: of the device's memory, what vLLM takes while it generates.
        gradient_checkpointing: hold each layer's input only, and compute the rest anew in the backward pass.
        chat_template: a file with the model's chat template in Jinja, relative to site.yaml; in place of the model's own.
        overlong_prompts: what to do with training prompts that are too long for this model: leave them out, or not train.
        connect_s: how long to try to reach the server, in seconds.
    """

    device: str = "auto"
    devices: int | None = Field(None, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = Field(None, ge=1)
    optimizer: Optimizer = Optimizer()
    lora: Lora | None = None
    algorithm: dict[str, Any] = {}
    tasks: dict[str, TaskDefinition] = {}
    micro_batch_tokens: int | None = Field(None, ge=1)
    generation_rows: int = Field(64, ge=1)
    generation_backend: Literal["hf", "vllm"] = "hf"
    vllm_memory_share: float = Field(0.4, gt=0, le=1)
    gradient_checkpointing: bool = False
    chat_template: Path | None = None
    overlong_prompts: Literal["drop", "refuse"] = "drop"
    checkpoint_every: int = Field(10, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    connect_s: Seconds = 60
    verifier_timeout_s: Seconds = 10
    limits: SiteLimits = SiteLimits()


class SimulatedAgent(StrictModel):
    """An agent of a simulated run: a model folder or hub id, or a warm-started demo model, and its site's settings."""

    model: str | None = None
    demo_model: Literal["a", "b"] | None = None
    site: SiteConfig = SiteConfig()

    @model_validator(mode="after")
    def _one_model(self) -> "SimulatedAgent":
        if (self.model is None) == (self.demo_model is None):
            raise ValueError("exactly one of model and demo_model must be given")
        return self


class SimulationConfig(StrictModel):
    """A whole federation on one box; ``compare`` names methods that the same agents are then trained with."""

    run: RunConfig
    agents: dict[str, SimulatedAgent] = Field(min_length=1)
    compare: tuple[MethodName, ...] = ()

    @field_validator("agents")
    @classmethod
    def _check_names(cls, value: dict[str, SimulatedAgent]) -> dict[str, SimulatedAgent]:
        for name in value:
            check_name("agent name", name)
        return value


C = TypeVar("C", bound=StrictModel)


def load(kind: type[C], path: Path | None, overrides: list[str] | None = None) -> C:
    """Reads a YAML file into a configuration, after ``a.b=value`` overrides (values are YAML).

    Raises UserError with one sentence for the first fault found.
    """
    data = _read_yaml(path) if path else {}
    for override in overrides or []:
        _apply_override(data, override)
    return parse(kind, data, source=str(path) if path else "--set")


def parse(kind: type[C], data: object, source: str) -> C:
    """Validates plain data. Raises UserError that names the key, and the nearest known one where it is unknown."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_fault(kind, error)}") from None


def merged_algorithm(run: RunConfig, site: SiteConfig) -> AlgorithmConfig:
    """The run's algorithm with the site's overrides, which win. Raises UserError for an unknown or bad key."""
    if "method" in site.algorithm:
        raise UserError("algorithm.method is the run's to choose: leave it out of the site's configuration")
    data = run.algorithm.model_dump(mode="json")
    for key, value in site.algorithm.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and isinstance(data.get(key), dict) else value
    return parse(AlgorithmConfig, data, source="algorithm of the site")


def rooted(site: SiteConfig, base_dir: Path) -> SiteConfig:
    """The site's configuration with its paths, which are relative to the folder of site.yaml, made absolute."""
    tasks = {
        name: task.model_copy(update={"path": (base_dir / task.path).absolute()})
        if isinstance(task, JsonLinesTask)
        else task
        for name, task in site.tasks.items()
    }
    template = site.chat_template and (base_dir / site.chat_template).absolute()
    return site.model_copy(update={"tasks": tasks, "chat_template": template})


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}  # all commented out
    except FileNotFoundError:
        raise UserError(f"there is no configuration file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold keys and values, not {type(data).__name__}")
    return data


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise UserError(f"--set takes key.path=value, not {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"--set {path}: {text!r} is not a YAML value") from None
    *parents, last = path.split(".")
    node = data
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {path}: {parent} is a value, not a section")
        node = child
    node[last] = value


def _first_fault(kind: type[BaseModel], error: ValidationError) -> str:
    # An unknown key explains a missing one (a typo makes both), so it is told first.
    faults = sorted(
        error.errors(), key=lambda fault: fault["type"] not in ("extra_forbidden", "unexpected_keyword_argument")
    )
    fault = faults[0]
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = difflib.get_close_matches(
            str(fault["loc"][-1]), sorted(_known_keys(kind, fault["loc"][:-1])), n=1, cutoff=0.5
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"unknown key {where}{hint}"
    if fault["type"] == "missing":
        return f"key {where} is missing"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def _known_keys(kind: type[BaseModel], section: Sequence[str | int]) -> set[str]:
    """Names of the keys of a configuration's section, which is named by its path."""
    schema = kind.model_json_schema()

    def alternatives(node: dict[str, Any]) -> list[dict[str, Any]]:
        if "$ref" in node:
            return alternatives(schema["$defs"][node["$ref"].rpartition("/")[2]])
        options = node.get("anyOf") or node.get("oneOf")
        return [each for option in options for each in alternatives(option)] if options else [node]

    nodes = alternatives(schema)
    for part in section:
        children = [
            node.get("properties", {}).get(part) or node.get("additionalProperties") or node.get("items")
            for node in nodes
        ]
        below = [each for child in children if child for each in alternatives(child)]
        # Where nothing lies below, the part is what tells the alternatives of a union apart.
        nodes = below or [node for node in nodes if node.get("properties", {}).get("kind", {}).get("const") == part]
    return {key for node in nodes for key in node.get("properties", {})}
