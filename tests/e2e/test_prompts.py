"""Prompts at a site: a chat template of the site's own, and what becomes of prompts that are too long."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import Forked, forking
from processes import Federation, assert_one_sentence, free_address, read_json, write_run
from transformers import AutoTokenizer

from hacrl_fed.config import SiteConfig, load
from hacrl_fed.tasks.registry import load_task
from hacrl_fed_client.loading import render_chat


@dataclass(frozen=True, slots=True)
class Waiting:
    """A run whose server waits for both agents, and whose shortest prompt is as long as any may be for agent a."""

    start: Callable[..., Forked]
    address: str
    lengths: dict[str, int]
    longest: int

    @property
    def too_long(self) -> list[str]:
        return [prompt for prompt, length in self.lengths.items() if length > self.longest]


@pytest.fixture(scope="module")
def waiting(federation: Federation, site_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """The server, started."""
    folder = tmp_path_factory.mktemp("waiting")
    tokenizer = AutoTokenizer.from_pretrained(federation.models["a"])
    task = load_task("digits", load(SiteConfig, site_file).tasks, site_file.parent)
    chats = {prompt.id: [{"role": "user", "content": prompt.text}] for prompt in task.train}
    lengths = {key: len(render_chat(tokenizer, chat, add_generation_prompt=True)) for key, chat in chats.items()}
    address = free_address()
    with forking(folder) as start:
        found = Waiting(start, address, lengths, min(lengths.values()))
        server = start(
            federation.server(write_run(folder, max_prompt_tokens=found.longest), address, folder / "server")
        )
        server.await_that(lambda: "listening on" in server.output())
        yield found


def test_prompts_that_are_too_long_are_left_out_and_counted(
    waiting: Waiting, federation: Federation, site_file: Path, tmp_path: Path
) -> None:
    a = waiting.start(federation.client("a", waiting.address, tmp_path, site_file))
    a.await_that(lambda: "left out" in a.output())
    said = (
        f"{len(waiting.too_long)} of {len(waiting.lengths)} training prompts are longer than {waiting.longest} tokens"
    )
    assert said in a.output()
    assert "no chat template" not in a.output()
    a.process.kill()


def test_prompts_that_are_too_long_are_refused_where_the_site_says_so(
    waiting: Waiting, federation: Federation, site_file: Path, tmp_path: Path
) -> None:
    arguments = federation.client("a", waiting.address, tmp_path, site_file, "--set", "overlong_prompts=refuse")
    first = waiting.too_long[0]
    counts = f"{len(waiting.too_long)} of {len(waiting.lengths)} training prompts"
    length = f"has {waiting.lengths[first]}"
    assert_one_sentence(waiting.start(arguments).wait(), 2, counts, f"the first, {first}, {length}", "overlong_prompts")
    assert not (tmp_path / "checkpoints").exists()


def test_a_chat_template_lies_beside_the_configuration_that_names_it(
    waiting: Waiting, federation: Federation, site_file: Path, tmp_path: Path
) -> None:
    site = read_json(site_file) | {"chat_template": "chat.jinja"}
    site["tasks"]["digits"]["path"] = str(site_file.parent / "digits.jsonl")
    (tmp_path / "site.yaml").write_text(json.dumps(site))
    # So long that no prompt is short enough, by which it is known to be in use.
    (tmp_path / "chat.jinja").write_text("x" * 100 + "{{ messages[0]['content'] }}")
    arguments = federation.client("b", waiting.address, tmp_path / "run", tmp_path / "site.yaml")
    ended = waiting.start(arguments).wait()
    assert_one_sentence(ended, 2, "every prompt of task digits is longer")
    assert "no chat template" not in ended.output
