"""Between text and token ids: own completions to text, and peers' text to the learner's ids.

Peer text must only ever give ids that ordinary text gives. A tokenizer of the `tokenizers` library leaves added tokens that
are not flagged special (such as <think>) in force under `split_special_tokens`, so peer text is encoded by a copy of it that
has no added token. One that is written in Python cannot be taken apart like that: text that gives a hidden id has no ids.
"""

import hashlib
import json
import secrets
from collections.abc import Sequence
from typing import Any, Protocol, cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hacrl_fed.records import FinishReason

AnyTokenizer = PreTrainedTokenizer | PreTrainedTokenizerFast


class Retokenizer:
    """Text to ids and back, for a tokenizer and the ids that end its completions: the end of turn first, or none."""

    def __init__(self, tokenizer: AnyTokenizer, eos_ids: Sequence[int]) -> None:
        self._eos_ids = frozenset(eos_ids)
        self._end = list(eos_ids[:1])
        self._plain: _PlainText = (
            _FastPlainText(tokenizer) if isinstance(tokenizer, PreTrainedTokenizerFast) else _SlowPlainText(tokenizer)
        )
        self._ordinary_ids = self._plain.ids - self._eos_ids

    def encode(self, texts: Sequence[str], finished: Sequence[bool]) -> list[list[int]]:
        """Ids of each text as ordinary text, with the end of turn, if there is one, appended where its source finished.

        A text that the tokenizer cannot express has no ids at all.
        """
        encoded = self._plain.encode(texts)
        return [
            [] if ids is None else [*ids, *(self._end if done else ())]
            for ids, done in zip(encoded, finished, strict=True)
        ]

    def reads_as(self, token_ids: Sequence[int], text: str, finish_reason: FinishReason) -> bool:
        """Whether a peer's ids, of the same tokenizer, are ordinary ones that decode to its text and end as it says."""
        finished = bool(token_ids) and token_ids[-1] in self._eos_ids
        body = token_ids[:-1] if finished else token_ids
        return (
            finished == (finish_reason is FinishReason.STOP)
            and self._ordinary_ids.issuperset(body)
            and self.decode([token_ids]) == [text]
        )

    def decode(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Text of each own completion, without the token that ended it; any other special token shows as its text."""
        bodies = [list(ids[:-1]) if ids and ids[-1] in self._eos_ids else list(ids) for ids in completions]
        return [self._plain.decode(body) for body in bodies]

    def round_trips(self, completions: Sequence[Sequence[int]]) -> list[bool]:
        """Whether encode(decode(ids)) == ids, for each own completion; where not, peers learn from other ids."""
        finished = [bool(ids) and ids[-1] in self._eos_ids for ids in completions]
        encoded = self.encode(self.decode(completions), finished)
        return [
            # Which of several ending tokens it was is no matter of the text.
            again[:-1] == list(ids[:-1]) if done else again == list(ids)
            for again, ids, done in zip(encoded, completions, finished, strict=True)
        ]


class _PlainText(Protocol):
    """A tokenizer to which all text is ordinary. ``ids`` are those that ordinary text may give."""

    ids: frozenset[int]

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | None]:
        """Ids of each text, or None for one that cannot be expressed."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special and added tokens show as their text, unknown ids give none."""
        ...


class _FastPlainText:
    """A tokenizer of the `tokenizers` library, encoding by a copy of it that has no added token."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        state: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
        hidden = _hidden_tokens(state)
        vocabulary = tokenizer.get_vocab()
        self.ids = frozenset(vocabulary.values()) - {vocabulary[token] for token in hidden}
        self._plain = _without_added_tokens(state, hidden)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | None]:
        try:
            encoded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception:  # noqa: BLE001  # the library raises no other class
            # Of a text with a character that it does not know, where it has no unknown token.
            return [None] if len(texts) == 1 else [ids for text in texts for ids in self.encode([text])]
        return [encoding.ids for encoding in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return _decode(self._tokenizer, ids)


class _SlowPlainText:
    """A tokenizer written in Python, whose ways are its class's own.

    Text goes through the public ``tokenize(split_special_tokens=True)``, by which the base class of all of them looks for
    no added token, special or not: emptying a copy's table of them would take private names that change between releases.
    What a class overrides, looks up as a whole piece, or gives for text that it does not know may still be a hidden id (the
    unknown token's is one): such a text counts as one that cannot be expressed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = frozenset(tokenizer.get_vocab().values())
        self.ids = self._known - set(tokenizer.added_tokens_decoder) - set(tokenizer.all_special_ids)

    def encode(self, texts: Sequence[str]) -> list[Sequence[int] | None]:
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> list[int] | None:
        try:
            tokens = self._tokenizer.tokenize(text, split_special_tokens=True)
            ids = cast(list[int], self._tokenizer.convert_tokens_to_ids(tokens))
        except (LookupError, ValueError, TypeError):  # how classes without an unknown token fail
            return None
        return ids if self.ids.issuperset(ids) else None

    def decode(self, ids: Sequence[int]) -> str:
        # A model may have more rows than its tokenizer has ids, on which these classes fail.
        return _decode(self._tokenizer, [token_id for token_id in ids if token_id in self._known])


def _decode(tokenizer: AnyTokenizer, ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return cast(str, text)  # annotated for batches too


def tokenizer_digest(tokenizer: AnyTokenizer, eos_ids: Sequence[int]) -> str:
    """SHA-256 over the vocabulary, merges (or piece scores), added tokens and ending ids, in a canonical form.

    Of a tokenizer written in Python, its class stands for merges and scores. Agents with the same digest read each other's
    ids alike, whatever library version wrote their files.
    """
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        canonical = {"kind": model["type"], "vocab": model["vocab"], "merges": _merges(model)}
    else:
        canonical = {"kind": type(tokenizer).__name__, "vocab": tokenizer.get_vocab(), "merges": []}
    added = tokenizer.added_tokens_decoder.items()
    canonical["added"] = [[token_id, token.content, token.special] for token_id, token in sorted(added)]
    canonical["eos"] = list(eos_ids)
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _hidden_tokens(state: dict[str, Any]) -> set[str]:
    """Added tokens, in a tokenizer's JSON, that ordinary text must not give.

    That is all but single characters (some repositories pad with "!") and those not flagged special that merges make
    (runs of spaces): they are ordinary text.
    """
    made = {left + right for left, right in _merges(state["model"])}
    return {
        token["content"]
        for token in state["added_tokens"]
        if len(token["content"]) > 1 and (token["special"] or token["content"] not in made)
    }


def _without_added_tokens(state: dict[str, Any], hidden: set[str]) -> Tokenizer:
    """The pipeline of a tokenizer's JSON, which is changed, without added tokens.

    Models that look up whole pieces (Unigram, WordPiece, WordLevel, BPE with ignore_merges) would still find "</s>"
    among their own entries, and some converted ones hold merges that make it: so the ``hidden`` entries are renamed and
    such merges dropped. The unknown token keeps its id, under its new name.
    """
    model = state["model"]

    # A name that no peer can know, else its text could spell the entry.
    unguessable = secrets.token_hex()

    def rename(entry: str) -> str:
        return unguessable + entry if entry in hidden else entry

    if isinstance(model["vocab"], dict):
        model["vocab"] = {rename(entry): token_id for entry, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[rename(entry), score] for entry, score in model["vocab"]]
    if "merges" in model:
        model["merges"] = [[left, right] for left, right in _merges(model) if not hidden & {left, right, left + right}]
    if model.get("unk_token") is not None:
        model["unk_token"] = rename(model["unk_token"])
    state.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Tokenizer.from_str(json.dumps(state))


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Merges of a BPE model's JSON, which older files write as "a b" and newer ones as ["a", "b"]; none for others."""
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", ())]
    return [(left, right) for left, right in merges]
