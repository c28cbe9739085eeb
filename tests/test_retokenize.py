"""Retokenising: peer text gives ordinary ids only, own ids survive or are counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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
