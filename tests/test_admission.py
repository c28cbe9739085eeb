"""Admission: every refusal by its name, rewards recomputed, and ids that are the learner's own."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from federation import AGENT_KEYS, STRANGER, TASK, TOKENIZER_DIGEST, Author, rollout, roster_of
from hacrl_fed.config import WireLimits
from hacrl_fed.protocol import digests, envelope
from hacrl_fed.protocol.keys import key_id
from hacrl_fed.records import FinishReason
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.admission import Admission, AdmittedChunk, ChunkRefusedError, StepExpectation
from hacrl_fed_client.retokenize import Retokenizer
from test_retokenize import unigram
from tiny_models import tiny_tokenizer

GENESIS, OTHER = digests.sha256_hex(b"genesis"), digests.sha256_hex(b"other")
TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
FIRST, SECOND = TASK.train[:2]
EXPECTED = StepExpectation(0, GENESIS, {prompt.id: prompt for prompt in (FIRST, SECOND)})
OUTSIDE = TASK.train[2]


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@dataclass(frozen=True)
class Undecided(ExactVerifier):
    """A verifier that cannot tell where a completion holds a question mark."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return Verdict(None, "cannot tell") if "?" in completion else ExactVerifier.verify(self, prompt, completion)


def admission(learner: str = "alpha", tokenizer_digest: str = OTHER, **limits: Any) -> Admission:
    """That of a site whose tokenizer is not the authors', unless its digest says so."""
    return Admission(
        learner,
        roster_of("alpha", "beta"),
        WireLimits(**limits),
        group_size=2,
        max_new_tokens=16,
        verifiers=VerifierPool(Undecided("whole"), 1.0, 1),
        retokenizer=Retokenizer(TOKENIZER, (EOS,)),
        tokenizer_digest=tokenizer_digest,
    )


def refusal_of(site: Admission, chunk: exchange_pb2.Chunk, expected: StepExpectation = EXPECTED) -> str:
    """The reason why a chunk is refused; it is counted once, under its agent's name."""
    before = site.refused.copy()
    with pytest.raises(ChunkRefusedError) as refusal:
        site.admit(chunk, expected)
    assert site.refused - before == Counter({(refusal.value.agent, refusal.value.reason): 1})
    return refusal.value.reason


# --- chunks


def forged(author: Author) -> exchange_pb2.Chunk:
    chunk = author.chunk(0, GENESIS, [rollout(FIRST)], key=STRANGER)
    chunk.header.key_id = key_id(AGENT_KEYS["beta"].public_key())
    return chunk


def changed(**changes: Any) -> Callable[[Author], exchange_pb2.Chunk]:
    return lambda author: author.chunk(0, GENESIS, [rollout(FIRST)], **changes)


def malformed_header(author: Author) -> exchange_pb2.Chunk:
    return exchange_pb2.Chunk(header=envelope.sign(AGENT_KEYS["beta"], envelope.CHUNK_HEADER_TYPE, b"\xff"))


def swapped_body(author: Author) -> exchange_pb2.Chunk:
    chunk = author.chunk(0, GENESIS, [rollout(FIRST)])
    return exchange_pb2.Chunk(header=chunk.header, body=author.chunk(0, GENESIS, [rollout(SECOND)]).body)


FAULTY: dict[str, tuple[Callable[[Author], exchange_pb2.Chunk], str]] = {
    "signed by a stranger": (changed(key=STRANGER), "signature"),
    "signed by another agent": (changed(key=AGENT_KEYS["alpha"]), "signature"),
    "forged": (forged, "signature"),
    "header": (malformed_header, "malformed"),
    "not in the roster": (changed(agent="gamma"), "roster"),
    "version": (changed(protocol_version=2), "version"),
    "run": (changed(run_id="other"), "run"),
    "step": (lambda author: author.chunk(1, GENESIS), "step"),
    "order": (changed(chunk_index=1), "order"),
    "manifest": (lambda author: author.chunk(0, OTHER), "manifest"),
    "swapped body": (swapped_body, "digest"),
    "digest": (changed(body_sha256=OTHER), "digest"),
    "size": (lambda author: author.chunk(0, GENESIS, body=bytes(2049)), "limits"),
    "body": (lambda author: author.chunk(0, GENESIS, body=b"\xff"), "malformed"),
    "count": (changed(rollout_count=2), "count"),
}


@pytest.mark.parametrize(("make", "reason"), FAULTY.values(), ids=FAULTY)
def test_a_faulty_chunk_is_refused_and_counted(make: Callable[[Author], exchange_pb2.Chunk], reason: str) -> None:
    assert refusal_of(admission(chunk_bytes=2048), make(Author("beta"))) == reason


def test_a_stranger_cannot_have_refusals_counted_against_an_agent_it_names() -> None:
    site = admission()
    refusal_of(site, changed(agent="gamma")(Author("beta")))
    assert site.refused == {("unknown", "roster"): 1}


def test_a_chain_is_followed_over_chunks_and_steps() -> None:
    site, author = admission(), Author("beta")
    for index in range(2):
        assert len(site.admit(author.chunk(0, GENESIS, [rollout(FIRST, index)]), EXPECTED).rollouts) == 1
    site.forget(0)
    later = replace(EXPECTED, step=1, previous_manifest=OTHER)
    assert len(site.admit(author.chunk(1, OTHER, [rollout(FIRST)]), later).rollouts) == 1
    assert not site.refused


def test_a_replayed_chunk_is_refused() -> None:
    site = admission()
    chunk = Author("beta").chunk(0, GENESIS, [rollout(FIRST)])
    site.admit(chunk, EXPECTED)
    assert refusal_of(site, chunk) == "replay"


def test_a_lost_chunk_is_one_refusal_and_the_chain_goes_on() -> None:
    site, author = admission(), Author("beta")
    site.admit(author.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED)
    author.chunk(0, GENESIS)
    assert refusal_of(site, author.chunk(0, GENESIS, [rollout(FIRST, 1)])) == "chain"
    author_goes_on = author.chunk(1, OTHER, [rollout(SECOND)])
    assert site.admit(author_goes_on, replace(EXPECTED, step=1, previous_manifest=OTHER)).rollouts


def test_a_chunk_of_another_fork_of_the_chain_is_refused() -> None:
    site, author, fork = admission(), Author("beta"), Author("beta")
    site.admit(author.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED)
    fork.chunk(0, GENESIS, [rollout(SECOND)])
    assert refusal_of(site, fork.chunk(0, GENESIS, [rollout(FIRST, 1)])) == "chain"


def test_a_superseded_incarnation_is_refused_and_the_new_one_begins_its_own_chain() -> None:
    site, old = admission(), Author("beta", 1)
    site.admit(old.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED)
    new = Author("beta", 2)
    # The same samples again: the earlier process's do not count.
    assert len(site.admit(new.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED).rollouts) == 1
    assert refusal_of(site, old.chunk(0, GENESIS, [rollout(FIRST, 1)])) == "incarnation"


def test_a_coordinator_that_tells_sites_different_things_is_found_out_one_step_later() -> None:
    told_alpha, told_beta = OTHER, digests.sha256_hex(b"another account")
    site = admission("alpha")
    of_beta = Author("beta").chunk(1, told_beta, [rollout(FIRST)])
    assert refusal_of(site, of_beta, StepExpectation(1, told_alpha, EXPECTED.prompts)) == "manifest"


# --- rollouts


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (rollout(OUTSIDE), "prompt"),
        (rollout(FIRST, 2), "sample"),
        (rollout(FIRST, 0), "sample"),  # there already
        (rollout(SECOND, text="x" * 65), "limits"),
        (rollout(SECOND, token_count=17), "limits"),
        (rollout(SECOND, text="2?"), "unverifiable"),
        (rollout(SECOND, text="", finish_reason=FinishReason.LENGTH), "empty"),
    ],
)
def test_a_faulty_rollout_is_dropped_and_counted_and_the_others_stay(bad: Any, reason: str) -> None:
    site = admission(text_bytes=64)
    chunk = site.admit(Author("beta").chunk(0, GENESIS, [rollout(FIRST), bad, rollout(FIRST, 1)]), EXPECTED)
    assert [admitted.rollout.sample_index for admitted in chunk.rollouts] == [0, 1]
    assert {admitted.source for admitted in chunk.rollouts} == {"beta"}
    assert site.refused == {("beta", reason): 1}


def test_a_sample_is_taken_once_over_all_chunks_of_a_step() -> None:
    site, author = admission(), Author("beta")
    site.admit(author.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED)
    assert site.admit(author.chunk(0, GENESIS, [rollout(FIRST)]), EXPECTED).rollouts == ()
    assert site.refused == {("beta", "sample"): 1}


def test_rewards_are_the_sites_own_and_disagreement_is_counted() -> None:
    site = admission()
    claims = [
        rollout(FIRST, 0, FIRST.answer, reward=1.0),
        rollout(FIRST, 1, "wrong", reward=1.0),
        rollout(SECOND, 0, SECOND.answer, reward=0.0),
        rollout(SECOND, 1, "wrong", reward=0.0),
    ]
    chunk = site.admit(Author("beta").chunk(0, GENESIS, claims), EXPECTED)
    assert [admitted.rollout.reward for admitted in chunk.rollouts] == [1.0, 0.0, 1.0, 0.0]
    assert site.reward_disagreements == {"beta": 2}
    assert not site.refused


def completions(chunk: AdmittedChunk) -> list[tuple[int, ...]]:
    return [admitted.completion_ids for admitted in chunk.rollouts]


def test_rollouts_of_the_same_tokenizer_keep_their_ids() -> None:
    # Not what the tokenizer would make of the text, but what the source sampled.
    split = (*ids("t"), *ids("h"), EOS)
    assert ids("th") != split[:-1]
    site = admission(tokenizer_digest=TOKENIZER_DIGEST)
    chunk = Author("beta").chunk(0, GENESIS, [rollout(FIRST, text="th", token_count=3, token_ids=split)])
    assert completions(site.admit(chunk, EXPECTED)) == [split]


def test_rollouts_of_another_tokenizer_are_retokenised_whatever_ids_they_bring() -> None:
    rollouts = [
        rollout(FIRST, 0, "the", token_count=2, token_ids=(1, 2)),
        rollout(FIRST, 1, "the", finish_reason=FinishReason.LENGTH),
        rollout(SECOND, 0, "<|im_end|>"),
    ]
    site = admission(tokenizer_digest=OTHER)
    finished, cut, literal = completions(site.admit(Author("beta").chunk(0, GENESIS, rollouts), EXPECTED))
    assert (finished, cut) == ((*ids("the"), EOS), ids("the"))
    assert literal[-1] == EOS
    assert EOS not in literal[:-1]


def test_rollouts_of_the_same_tokenizer_without_ids_are_retokenised() -> None:
    site = admission(tokenizer_digest=TOKENIZER_DIGEST)
    chunk = Author("beta").chunk(0, GENESIS, [rollout(FIRST, text="the")])
    assert completions(site.admit(chunk, EXPECTED)) == [(*ids("the"), EOS)]


@pytest.mark.parametrize("token_ids", [(*ids("x"), EOS), (EOS, EOS), (*ids("the"), *ids("the"))])
def test_ids_that_do_not_read_as_their_text_are_refused(token_ids: tuple[int, ...]) -> None:
    site = admission(tokenizer_digest=TOKENIZER_DIGEST)
    bad = rollout(FIRST, text="the", token_count=len(token_ids), token_ids=token_ids)
    assert site.admit(Author("beta").chunk(0, GENESIS, [bad]), EXPECTED).rollouts == ()
    assert site.refused == {("beta", "tokens"): 1}


def test_a_site_takes_back_what_an_earlier_process_of_its_own_published() -> None:
    site = admission("beta", tokenizer_digest=TOKENIZER_DIGEST)
    sampled = (*ids("t"), EOS, EOS)
    chunk = Author("beta").chunk(0, GENESIS, [rollout(FIRST, text="t", token_count=3, token_ids=sampled)])
    assert completions(site.admit(chunk, EXPECTED)) == [sampled]


@pytest.mark.parametrize("prefix", ["", "\0", "a\0"])
def test_no_text_spells_the_end_of_turn_of_a_tokenizer_that_looks_up_whole_pieces(prefix: str) -> None:
    tokenizer = unigram()
    [literal] = Retokenizer(tokenizer, (tokenizer.eos_token_id,)).encode([f"{prefix}</s>"], [False])
    assert tokenizer.eos_token_id not in literal
