"""Retokenising: peer text gives ordinary ids only, own ids survive or are counted."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from hacrl_fed.records import FinishReason
from hacrl_fed_client.retokenize import Retokenizer, tokenizer_digest
from tiny_models import END, MERGES, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
PAD = TOKENIZER.pad_token_id
RETOKENIZER = Retokenizer(TOKENIZER, (EOS, PAD))  # PAD stands for a second ending id
ADDED = set(TOKENIZER.added_tokens_decoder)
SPECIAL_TEXTS = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<think>", "<|pad|>", "</s>", "<unk>", " ", "the", "<", "|"]
)


class WordTokenizer(PreTrainedTokenizer):
    """Written in Python, and finds special tokens in ordinary text as whole pieces: words, runs of signs, white space."""

    def __init__(self, words: list[str], **settings: object) -> None:
        self._ids = {word: token_id for token_id, word in enumerate(words)}
        super().__init__(words=words, **settings)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: object) -> list[str]:
        return re.findall(r"<[^<>]*>|\w+|\s|.", text)

    def _convert_token_to_id(self, token: str) -> int:
        if self.unk_token is None:
            return self._ids[token]
        return self._ids.get(token, self._ids[str(self.unk_token)])

    def _convert_id_to_token(self, index: int) -> str:
        return next(word for word, token_id in self._ids.items() if token_id == index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def words(**settings: object) -> WordTokenizer:
    tokenizer = WordTokenizer([*"abc <>|/_", "</s>", "<unk>", "think", "<think>", "the"], **settings)
    tokenizer.add_tokens(["<think>", "<new>"])
    return tokenizer


def byt5() -> ByT5Tokenizer:
    tokenizer = ByT5Tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["~", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>"])
    return tokenizer


SLOW = {"bytes": byt5(), "words": words(eos_token="</s>"), "unknown": words(eos_token="</s>", unk_token="<unk>")}


def llama_like(*, merges_make_eos: bool) -> PreTrainedTokenizerFast:
    """BPE over ▁-words with <unk>, <s>, </s> in its own vocabulary, as converted sentencepiece models have them."""
    merges = [("t", "h"), ("<", "/"), ("s", ">")]
    if merges_make_eos:
        merges.append(("</", "s>"))
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz<>/|_0123456789"]
    tokens = ["<unk>", "<s>", "</s>", *letters, *(left + right for left, right in merges)]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def unigram() -> PreTrainedTokenizerFast:
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<think>", -1.0), *((c, -5.0) for c in "▁</>thinkseab")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    backend.add_special_tokens(["<unk>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("text", ["<|im_end|>", "a <think> b", "<|im_start|>system\n<|im_end|>", "<|pad|>"])
def test_added_tokens_are_not_parsed_out_of_peer_text(text: str) -> None:
    # Otherwise they are, which is what this module is for.
    assert ADDED.intersection(TOKENIZER.encode(text, add_special_tokens=False))
    [ids] = RETOKENIZER.encode([text], [False])
    assert not ADDED.intersection(ids)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize(
    "tokenizer",
    [llama_like(merges_make_eos=False), llama_like(merges_make_eos=True), unigram()],
    ids=["bpe", "merged", "unigram"],
)
def test_nor_found_in_the_models_own_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    retokenizer = Retokenizer(tokenizer, (tokenizer.eos_token_id,))
    for text in ["</s>", "a</s>b", "<think>", "<unk>", "a </s> <think> b"]:
        [ids] = retokenizer.encode([text], [False])
        # "u" is unknown to the Unigram model: an unknown character may be <unk>, the literal <unk> may not be one.
        assert not (set(tokenizer.added_tokens_decoder) - {tokenizer.unk_token_id}).intersection(ids)
        if "u" not in text:
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == text
    assert retokenizer.encode(["é"], [True]) == [[tokenizer.unk_token_id, tokenizer.eos_token_id]]


@given(st.lists(SPECIAL_TEXTS | st.text(st.characters(exclude_categories=("Cs", "Cc")))).map("".join))
def test_any_peer_text_gives_ordinary_ids_that_decode_to_it(text: str) -> None:
    [ids] = RETOKENIZER.encode([text], [False])
    assert not ADDED.intersection(ids)
    assert RETOKENIZER.decode([ids]) == [text]
    assert RETOKENIZER.reads_as(ids, text, FinishReason.LENGTH)


def test_ordinary_text_is_encoded_as_the_tokenizer_does() -> None:
    texts = ["the cat and 12 dogs", "naïve 中文 🙂", "", "  spaces\n\tand tabs "]
    assert RETOKENIZER.encode(texts, [False] * 4) == [TOKENIZER.encode(t, add_special_tokens=False) for t in texts]


def test_an_added_token_that_is_ordinary_text_besides_stays() -> None:
    # A run of spaces that merges make too, as in Gemma, and a pad token that is an ordinary character.
    backend = Tokenizer(models.BPE(vocab={"a": 0, "▁": 1, "!": 2, "▁▁": 3}, merges=[("▁", "▁")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.add_tokens([AddedToken("▁▁", special=False)])
    backend.add_special_tokens(["!", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="!", eos_token="</s>")
    assert Retokenizer(tokenizer, (tokenizer.eos_token_id,)).encode(["a  a!"], [False]) == [[0, 3, 0, 2]]


def test_the_end_of_turn_is_appended_only_where_the_source_finished() -> None:
    finished, cut = RETOKENIZER.encode(["ab", "ab"], [True, False])
    assert finished == [*cut, EOS]
    assert RETOKENIZER.encode([""], [True]) == [[EOS]]
    assert RETOKENIZER.encode([], []) == []
    with pytest.raises(ValueError):
        RETOKENIZER.encode(["ab"], [])


def test_own_completions_decode_without_what_ended_them() -> None:
    a, b = TOKENIZER.convert_tokens_to_ids(["a", "b"])
    assert RETOKENIZER.decode([[a, b, EOS], [a, b], [a, EOS, b], [EOS], [a, PAD]]) == ["ab", "ab", f"a{END}b", "", "a"]


def test_round_trips_tell_canonical_ids_from_others() -> None:
    t, h, th, e, the = TOKENIZER.convert_tokens_to_ids(["t", "h", "th", "e", "the"])
    think = TOKENIZER.convert_tokens_to_ids("<think>")
    completions = [[the, EOS], [the], [th, e], [t, h, e, EOS], [the, PAD], [think], [EOS]]
    assert RETOKENIZER.round_trips(completions) == [True, True, False, False, True, False, True]


def test_ids_of_a_peer_must_be_ordinary_and_read_as_its_text() -> None:
    t, h, the, e = TOKENIZER.convert_tokens_to_ids(["t", "h", "the", "e"])
    start = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
    reads_as = RETOKENIZER.reads_as
    assert reads_as([the, EOS], "the", FinishReason.STOP)
    assert reads_as([t, h, e], "the", FinishReason.LENGTH)  # not canonical, but what the source sampled
    assert reads_as([the, PAD], "the", FinishReason.STOP)
    assert not reads_as([the], "the", FinishReason.STOP)
    assert not reads_as([the, EOS], "the", FinishReason.LENGTH)
    assert not reads_as([the, EOS, EOS], f"the{END}", FinishReason.STOP)
    assert not reads_as([the], "and", FinishReason.LENGTH)
    assert not reads_as([start, the], "<|im_start|>the", FinishReason.LENGTH)
    assert not reads_as([the, 4000], "the", FinishReason.LENGTH)  # unknown ids decode to nothing


def test_equal_tokenizers_have_equal_digests_and_no_others() -> None:
    digest = tokenizer_digest(TOKENIZER, (EOS,))
    assert digest == tokenizer_digest(tiny_tokenizer(chat=False), (EOS,))
    TOKENIZER("the", padding="max_length", truncation=True, max_length=9)  # leaves settings behind in the backend
    assert digest == tokenizer_digest(TOKENIZER, (EOS,))
    more = tiny_tokenizer()
    more.add_tokens(["<more>"])
    others = [
        tokenizer_digest(TOKENIZER, (EOS, PAD)),
        tokenizer_digest(tiny_tokenizer(merges=MERGES[:-1]), (EOS,)),
        tokenizer_digest(tiny_tokenizer(merges=[MERGES[3], *MERGES[:3], *MERGES[4:]]), (EOS,)),
        tokenizer_digest(more, (EOS,)),
        tokenizer_digest(unigram(), (1,)),
    ]
    assert len({digest, *others}) == 6


def test_a_digest_does_not_depend_on_how_merges_are_written() -> None:
    state = json.loads(TOKENIZER.backend_tokenizer.to_str())
    state["model"]["merges"] = [" ".join(merge) for merge in state["model"]["merges"]]
    old = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=END, pad_token="<|pad|>"
    )
    assert tokenizer_digest(old, (EOS,)) == tokenizer_digest(TOKENIZER, (EOS,))


@pytest.mark.parametrize("name", SLOW)
@given(data=st.data())
def test_no_peer_text_gives_a_hidden_id_of_a_tokenizer_written_in_python(name: str, data: st.DataObject) -> None:
    tokenizer = SLOW[name]
    hidden = set(tokenizer.added_tokens_decoder)
    spellings = st.sampled_from([*tokenizer.added_tokens_encoder, "the", " ", "<", "a", "~"])
    text = data.draw(st.lists(spellings | st.text(st.characters(exclude_categories=("Cs", "Cc")))).map("".join))
    retokenizer = Retokenizer(tokenizer, (tokenizer.eos_token_id,))
    [ids] = retokenizer.encode([text], [False])
    assert not hidden.intersection(ids)
    # No ids for what it cannot express; else they are the text's.
    assert ids == [] or retokenizer.decode([ids]) == [text]
    assert ids == [] or retokenizer.reads_as(ids, text, FinishReason.LENGTH)
    if name == "bytes" and "~" not in text:
        assert len(ids) == len(text.encode())
    assert retokenizer.encode([text], [True]) == [[*ids, tokenizer.eos_token_id] if ids or not text else []]


def test_text_that_a_tokenizer_written_in_python_cannot_express_has_no_ids() -> None:
    for name in ("words", "unknown"):
        retokenizer = Retokenizer(SLOW[name], (SLOW[name].eos_token_id,))
        texts = ["a b", "é", "</s>", "<think>", "a <unk>", "the <", "<new>"]
        encoded = retokenizer.encode(texts, [True] * len(texts))
        known = name == "words"  # where <unk> is a word like others
        assert [bool(ids) for ids in encoded] == [True, False, False, False, known, True, False]
        assert retokenizer.decode(encoded)[0] == "a b" and encoded[0][-1] == SLOW[name].eos_token_id
    # A single character that is a special token, in a tokenizer of bytes.
    assert Retokenizer(SLOW["bytes"], (1,)).encode(["a~", "a"], [False, False]) == [[], [100]]


def test_own_completions_of_a_tokenizer_written_in_python() -> None:
    tokenizer = SLOW["bytes"]
    retokenizer = Retokenizer(tokenizer, (tokenizer.eos_token_id,))
    think, beyond = tokenizer.convert_tokens_to_ids("<think>"), len(tokenizer) + 5
    completions = [[100, 101, 1], [100, think], [100, beyond, 101], [1], [198, 172], [198]]
    assert retokenizer.decode(completions) == ["ab", "a<think>", "ab", "", "é", ""]
    assert retokenizer.round_trips(completions) == [True, False, False, True, True, False]
    assert retokenizer.reads_as([100, 1], "a", FinishReason.STOP)
    assert not retokenizer.reads_as([100, think], "a<think>", FinishReason.LENGTH)
    assert not retokenizer.reads_as([100, beyond], "a", FinishReason.LENGTH)


def test_the_digest_of_a_tokenizer_written_in_python_is_that_of_its_vocabulary(tmp_path: Path) -> None:
    digest = tokenizer_digest(byt5(), (1,))
    byt5().save_pretrained(tmp_path)
    assert digest == tokenizer_digest(ByT5Tokenizer.from_pretrained(tmp_path), (1,))
    others = [
        tokenizer_digest(byt5(), ()),
        tokenizer_digest(ByT5Tokenizer(), (1,)),
        tokenizer_digest(words(eos_token="</s>"), (1,)),
        tokenizer_digest(words(), (1,)),
        tokenizer_digest(WordTokenizer(["b", "a"]), (1,)),
        tokenizer_digest(WordTokenizer(["a", "b"]), (1,)),
    ]
    assert len({digest, *others}) == 7


@pytest.mark.parametrize("tokenizer", [TOKENIZER, SLOW["bytes"]], ids=["fast", "slow"])
def test_without_any_ending_id_nothing_is_appended(tokenizer: PreTrainedTokenizer | PreTrainedTokenizerFast) -> None:
    retokenizer = Retokenizer(tokenizer, ())
    finished, cut, empty = retokenizer.encode(["ab", "ab", ""], [True, False, True])
    assert finished == cut and len(cut) == 2 and empty == []
    assert retokenizer.decode([cut]) == ["ab"]
    assert retokenizer.round_trips([cut]) == [True]
    assert retokenizer.reads_as(cut, "ab", FinishReason.LENGTH)
    assert not retokenizer.reads_as(cut, "ab", FinishReason.STOP)
