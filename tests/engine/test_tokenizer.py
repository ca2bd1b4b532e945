"""Tokenizer: the same text as `tokenizers` and transformers give, whole or piece by piece."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import model_zoo
from octavo.engine.tokenizer import Detokenizer, Room, Tokenizer
from octavo.errors import InvalidRequest, ModelError, RequestTooLong
from octavo.model_files import open_files

TEXT = "Grüße aus 東京: 😀, 👩‍🚀 and naïve façades; the quick brown fox. π≈3\n\n\ttab  two spaces"


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer.from_directory(model_zoo.model_directory("gpt2"))


@pytest.fixture(scope="module")
def sentence_piece_state() -> dict[str, Any]:
    """As Llama 2's: spaces are marks in front of words, unknown characters are byte tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox and the lazy dog"], trainer)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    # Byte tokens are ordinary ones in real vocabularies; the trainer knows only special ones.
    state: dict[str, Any] = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    return state


@pytest.fixture(scope="module")
def sentence_piece(
    sentence_piece_state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    directory = tmp_path_factory.mktemp("sentence-piece")
    (directory / "tokenizer.json").write_text(json.dumps(sentence_piece_state))
    return Tokenizer.from_directory(directory)


def piece_vocabulary(directory: Path, kind: str) -> Tokenizer:
    """A small vocabulary of pieces whose text depends on what stands before them."""
    specials = ["<unk>", "<s>", "</s>"]
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trainer: Any = trainers.BpeTrainer(vocab_size=120, special_tokens=specials, show_progress=False)
    match kind:
        case "word pieces":
            backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
            trainer = trainers.WordPieceTrainer(
                vocab_size=120, special_tokens=specials, show_progress=False
            )
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            backend.decoder = decoders.WordPiece(cleanup=True)
        case "metaspace":
            backend.pre_tokenizer = pre_tokenizers.Metaspace()
            backend.decoder = decoders.Metaspace()
        case "word ends":
            backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
            trainer = trainers.BpeTrainer(
                vocab_size=120,
                special_tokens=specials,
                end_of_word_suffix="</w>",
                show_progress=False,
            )
            backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            backend.decoder = decoders.BPEDecoder()
    backend.train_from_iterator([TEXT, "the quick brown fox and the lazy dog don't mind."], trainer)
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer.from_directory(directory)


def stream(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]


def test_encode_and_decode_round_trip(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode(TEXT)) == TEXT


def test_ids_equal_transformers(byte_level: Tokenizer) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(model_zoo.model_directory("gpt2"))
    assert byte_level.encode(TEXT) == reference.encode(TEXT)
    for role, token_id in ("bos_token", model_zoo.BOS_ID), ("eos_token", model_zoo.EOS_ID):
        ids = byte_level.encode(byte_level.special_tokens[role], add_special_tokens=False)
        assert ids == [getattr(reference, f"{role}_id")] == [token_id]
    assert byte_level.vocab_size == len(reference)


def test_byte_level_pieces_join_to_the_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(TEXT)
    assert "".join(stream(byte_level.detokenizer(), ids)) == TEXT


def test_byte_level_garbage_decodes_as_the_whole_does(byte_level: Tokenizer) -> None:
    """Random tokens are mostly broken UTF-8: what a random model writes."""
    rng = random.Random(0)
    for _ in range(2000):
        ids = rng.choices(range(byte_level.vocab_size), k=rng.randint(1, 30))
        for skip in (True, False):
            pieces = stream(byte_level.detokenizer(skip_special_tokens=skip), ids)
            assert "".join(pieces) == byte_level.decode(ids, skip_special_tokens=skip)


def test_an_incomplete_character_is_held_back(byte_level: Tokenizer) -> None:
    rare = "\N{EXTRATERRESTRIAL ALIEN}"  # not in the training text: one token a byte
    ids = byte_level.encode(rare)
    assert len(ids) > 1
    pieces = stream(byte_level.detokenizer(), ids)
    assert pieces == [""] * (len(ids) - 1) + [rare, ""]
    assert stream(byte_level.detokenizer(), ids[:-1])[-1] == "\ufffd"


def test_added_tokens_outside_the_byte_alphabet(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(
        str(model_zoo.model_directory("gpt2") / "tokenizer.json")
    )
    backend.add_tokens(["two words", "東"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("say two words 東京")
    assert "".join(stream(tokenizer.detokenizer(), ids)) == "say two words 東京"


NEW_ID = 320  # the first one that model_zoo's tokenizer has no token for
# What stands beside a tokenizer.json -> the files.
BESIDE: dict[str, dict[str, Any]] = {
    "described": {
        "tokenizer_config": {
            "added_tokens_decoder": {
                str(NEW_ID + 1): {"content": "<sep>", "special": True, "normalized": False},
                str(NEW_ID): {"content": "<hl>", "lstrip": True, "rstrip": True},
                "1": {"content": "<eos>", "lstrip": True, "special": True},
            },
            "pad_token": "[PAD]",
        },
        "special_tokens_map": {"sep_token": "<unread>"},
    },
    "older": {
        "added_tokens": {"<sep>": NEW_ID + 1, "<hl>": NEW_ID},
        "special_tokens_map": {"sep_token": "<sep>", "pad_token": {"content": "[PAD]"}},
    },
    "roles": {
        "tokenizer_config": {
            "image_token": "<hl>",
            "pad_token": {"__type": "AddedToken", "content": "[PAD]", "rstrip": True},
            "additional_special_tokens": ["<sep>"],
            "unk_token": None,
        }
    },
    "named": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<hl>"}}},
}


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_that_tokenizer_json_lacks_equal_transformers(tmp_path: Path, name: str) -> None:
    source = model_zoo.model_directory("gpt2")
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((source / file).read_bytes())
    of_no_model = {"tokenizer_class": "PreTrainedTokenizerFast"}  # GPT-2's has tokens of its own
    config = of_no_model | BESIDE[name].get("tokenizer_config", {})
    files = BESIDE[name] | {"tokenizer_config": config}
    for file, fields in files.items():
        (tmp_path / f"{file}.json").write_text(json.dumps(fields))
    tokenizer = Tokenizer.from_directory(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.encode("The  <hl> quick <eos><sep> fox[PAD] , <unread> dog")
    assert ids == reference.encode("The  <hl> quick <eos><sep> fox[PAD] , <unread> dog")
    assert NEW_ID in ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    roles = {role: str(token) for role, token in reference.special_tokens_map.items()}
    assert tokenizer.special_tokens == {
        role: token for role, token in roles.items() if role.endswith("_token")
    }
    source_text = open_files(tmp_path).tokenizer_source()  # what llguidance reads
    assert source_text is not None
    assert tokenizers.Tokenizer.from_str(source_text).get_vocab_size() == len(reference)


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"320": {"content": 3}}}, "token 3 is not"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"320": {"content": "x", "lstrip": 1}}},
            "added_tokens_decoder: 320: lstrip is 1; it must be true or false",
        ),
        ("added_tokens", {"<hl>": "320"}, "added_tokens.json: '<hl>' is '320', which is no token"),
        ("special_tokens_map", {"eos_token": "\ud800"}, "eos_token is .*; it is not valid text"),
    ],
)
def test_added_tokens_that_are_none(
    tmp_path: Path, file: str, fields: dict[str, object], message: str
) -> None:
    source = model_zoo.model_directory("gpt2") / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(source.read_bytes())
    (tmp_path / f"{file}.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_special_tokens_are_skipped_on_request(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("one"), model_zoo.EOS_ID, *byte_level.encode("two")]
    assert "".join(stream(byte_level.detokenizer(), ids)) == "onetwo"
    detokenizer = byte_level.detokenizer(skip_special_tokens=False)
    assert "".join(stream(detokenizer, ids)) == "one<eos>two"


def test_ids_outside_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([100_000]) == ""
    assert byte_level.token_bytes(100_000) == b""
    assert stream(byte_level.detokenizer(), [100_000]) == ["", ""]


@pytest.mark.parametrize("text", [TEXT, "the fox", "€€😀 the", "a\ufffdb"])
def test_sentence_piece_pieces_join_to_the_whole(sentence_piece: Tokenizer, text: str) -> None:
    ids = sentence_piece.encode(text)
    assert "".join(stream(sentence_piece.detokenizer(), ids)) == sentence_piece.decode(ids) == text


def test_a_prompt_keeps_the_first_space(sentence_piece: Tokenizer) -> None:
    prompt, output = sentence_piece.encode("the quick"), sentence_piece.encode("brown fox")
    assert "".join(stream(sentence_piece.detokenizer(prompt), output)) == " brown fox"


CHARACTERS = [
    *(" ", "  ", "the ", "fox", "quick", " brown", "a", ".", ", ", " don't", "\n", "\t", "7"),
    *("ü", "π", "東", "京", "語", "한", "\u0301", "e\u0301", "\u200d", "ﷺ", "\u00a0", "\u2581"),
    *(
        "😀",
        "👩\u200d🚀",
        "👨\u200d👩\u200d👧\u200d👦",
        "🏳\ufe0f\u200d🌈",
        "🇩🇪",
        "👍🏽",
        "\U0001d518",
        "\U000e0001",
    ),
]


def differences_at_random_cuts(tokenizer: Tokenizer, num_cuts: int, characters: list[str]) -> int:
    """How many outputs, streamed after a prompt, are not what the whole text says they are.

    A character that the cut divides is the output's, for there it is completed.
    """
    rng = random.Random(1)
    num_wrong = 0
    for _ in range(num_cuts):
        ids = tokenizer.encode("".join(rng.choices(characters, k=rng.randint(1, 12))))
        cut = rng.randint(0, len(ids))
        whole = tokenizer.decode(ids)
        complete = [tokenizer.decode(ids[: max(0, cut - i)]).rstrip("\ufffd") for i in range(4)]
        expected = whole[max(len(text) for text in complete if whole.startswith(text)) :]
        pieces = stream(tokenizer.detokenizer(ids[:cut]), ids[cut:])
        num_wrong += "".join(pieces) != expected
    return num_wrong


def test_text_cut_anywhere_with_byte_fallback(
    sentence_piece: Tokenizer, sentence_piece_state: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts that end in, and outputs that begin with, characters of several byte tokens."""
    assert differences_at_random_cuts(sentence_piece, 500, CHARACTERS) == 0
    parts = sentence_piece_state["decoder"]["decoders"]
    state = sentence_piece_state | {
        "decoder": {"type": "Sequence", "decoders": parts[:3]},  # Gemma's strips no space
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert differences_at_random_cuts(Tokenizer.from_directory(tmp_path), 500, CHARACTERS) == 0


def test_text_cut_anywhere_in_bytes(byte_level: Tokenizer) -> None:
    assert differences_at_random_cuts(byte_level, 500, CHARACTERS) == 0


@pytest.mark.parametrize("kind", ["word pieces", "metaspace", "word ends"])
def test_text_cut_anywhere_in_pieces(tmp_path: Path, kind: str) -> None:
    tokenizer = piece_vocabulary(tmp_path / "pieces", kind)
    assert differences_at_random_cuts(tokenizer, 300, CHARACTERS[:12]) == 0


def test_special_tokens_at_the_end_of_a_prompt_do_not_hide_it(sentence_piece: Tokenizer) -> None:
    prompt = [*sentence_piece.encode("the quick"), *[2] * 9, 100_000]
    output = sentence_piece.encode("brown fox")
    assert "".join(stream(sentence_piece.detokenizer(prompt), output)) == " brown fox"
    assert "".join(stream(sentence_piece.detokenizer([2, 2]), output)) == "brown fox"


def test_a_prompt_that_ends_inside_a_character(
    sentence_piece: Tokenizer, byte_level: Tokenizer
) -> None:
    """The output has the character if it completes it; U+FFFD has been the prompt's otherwise."""
    for tokenizer in (sentence_piece, byte_level):
        ids = tokenizer.encode("the \N{EXTRATERRESTRIAL ALIEN}")
        word = tokenizer.encode("fox")[-1:]
        word_text = tokenizer.decode(ids[:1] + word).removeprefix(tokenizer.decode(ids[:1]))
        for cut in (-1, -2):
            whole = stream(tokenizer.detokenizer(ids[:cut]), ids[cut:])
            assert "".join(whole) == "\N{EXTRATERRESTRIAL ALIEN}"
            broken = stream(tokenizer.detokenizer(ids[:cut]), word)
            assert "".join(broken) == word_text
            assert stream(tokenizer.detokenizer(ids[:cut]), []) == [""]


def test_a_broken_character_leaves_its_neighbours_whole(sentence_piece: Tokenizer) -> None:
    """`tokenizers` itself makes every byte of such a run U+FFFD."""
    ids = sentence_piece.encode("東京😀")
    assert stream(sentence_piece.detokenizer(), ids[:-1])[-1] == "\ufffd"
    text = "".join(stream(sentence_piece.detokenizer(), ids[:-1]))
    assert text == "東京\ufffd"
    text = "".join(stream(sentence_piece.detokenizer(ids[:2]), ids[2:4] + ids[5:]))
    assert text == "東\ufffd\ufffd😀"  # 京 without its first byte


def test_tokens_by_themselves_keep_their_spaces(sentence_piece: Tokenizer) -> None:
    ids = sentence_piece.encode("the fox \N{EURO SIGN}")
    assert b"".join(map(sentence_piece.token_bytes, ids)).decode() == " the fox \N{EURO SIGN}"
    assert [i for i in (0, 1, 2, *ids) if sentence_piece.is_special(i)] == [0, 1, 2]


def test_broken_bytes_are_not_held_back_for_ever(sentence_piece: Tokenizer) -> None:
    broken = [sentence_piece.encode("\x80")[-1]] * 100  # a continuation byte
    pieces = stream(sentence_piece.detokenizer(), broken)
    assert len("".join(pieces[:20])) >= 8
    assert "the" in "".join(
        stream(sentence_piece.detokenizer(), broken + sentence_piece.encode("the"))
    )


class RecordingBackend:
    """A tokenizer of the library that notes which of its methods are called."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self.backend, name)


def test_encoding_lets_other_threads_run(byte_level: Tokenizer) -> None:
    """Of the library's methods, `encode` and `decode` keep the GIL; those for batches do not."""
    backend = tokenizers.Tokenizer.from_file(
        str(model_zoo.model_directory("gpt2") / "tokenizer.json")
    )
    recorder = RecordingBackend(backend)
    tokenizer = Tokenizer(backend, {}, None)
    tokenizer._backend = recorder
    ids = tokenizer.encode(TEXT * 100)
    assert tokenizer.decode(ids) == TEXT * 100
    assert recorder.calls == ["encode_batch_fast", "decode_batch"]
    assert ids == backend.encode(TEXT * 100).ids


def test_a_text_that_cannot_fit_is_refused_before_any_work() -> None:
    backend = tokenizers.Tokenizer.from_file(
        str(model_zoo.model_directory("gpt2") / "tokenizer.json")
    )
    tokenizer = Tokenizer(backend, {}, None)
    longest = max(map(len, backend.get_vocab()))
    assert tokenizer.max_characters_per_token == longest
    tokenizer._backend = recorder = RecordingBackend(backend)
    message = (
        rf"messages: {99 * longest + 1} characters leave .* 100 tokens, each of at most {longest}"
    )
    with pytest.raises(RequestTooLong, match=message):
        tokenizer.encode("a" * (99 * longest + 1), field="messages", room=Room.before_output(100))
    assert recorder.calls == []
    with pytest.raises(
        RequestTooLong, match="prompt: 100 tokens leave no room for output in a con"
    ):
        tokenizer.encode("\n" * 100, room=Room.before_output(100))
    assert len(tokenizer.encode("\n" * 99, room=Room.before_output(100))) == 99


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        ({}, 1),
        ({"normalizer": {"type": "NFC"}}, 4),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, 4),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}}, None),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": None}, None),  # then a character that is not in the vocabulary is lost
    ],
)
def test_texts_are_measured_only_where_no_character_is_lost(
    tmp_path: Path, change: dict[str, Any], factor: int | None
) -> None:
    """And the bound holds: no random text has more characters a token."""
    state = json.loads((model_zoo.model_directory("gpt2") / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(state | change))
    tokenizer = Tokenizer.from_directory(tmp_path)
    bound = tokenizer.max_characters_per_token
    if factor is None:
        assert bound is None
        return
    assert bound == factor * max(map(len, state["model"]["vocab"]))
    rng = random.Random(3)
    for _ in range(200):
        text = "".join(rng.choices([*CHARACTERS, "e\u0302\u0323"], k=rng.randint(1, 12)))
        assert len(text) <= bound * len(tokenizer.encode(text))


def test_tokens_that_swallow_spaces_leave_no_bound(
    byte_level: Tokenizer, sentence_piece: Tokenizer, tmp_path: Path
) -> None:
    whole_training_text = "▁the▁quick▁brown▁fox▁and▁the▁lazy▁dog"  # no pre-tokenizer cuts it
    assert sentence_piece.max_characters_per_token == len(whole_training_text)
    assert piece_vocabulary(tmp_path / "pieces", "word pieces").max_characters_per_token is None
    backend = tokenizers.Tokenizer.from_file(
        str(model_zoo.model_directory("gpt2") / "tokenizer.json")
    )
    backend.add_tokens([tokenizers.AddedToken("<turn>", rstrip=True)])
    assert Tokenizer(backend, {}, None).max_characters_per_token is None


def test_truncation_in_the_file_is_ignored(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(
        str(model_zoo.model_directory("gpt2") / "tokenizer.json")
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).encode(TEXT) == backend_ids(TEXT)


def backend_ids(text: str) -> list[int]:
    path = model_zoo.model_directory("gpt2") / "tokenizer.json"
    ids: list[int] = tokenizers.Tokenizer.from_file(str(path)).encode(text).ids
    return ids


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json: give prompts as token ids"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_directory(tmp_path)


def test_text_that_the_library_fails_on() -> None:
    """A panic of the library is a refusal, and the tokenizer goes on."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.normalizer = normalizers.Replace(tokenizers.Regex("(a|a)*b"), "b")  # exponential
    tokenizer = Tokenizer(backend, {}, None)
    with pytest.raises(InvalidRequest, match="prompt: the tokenizer fails on it"):
        tokenizer.encode("a" * 40 + "cb")
    assert tokenizer.encode("aab") == [1]


def test_text_that_is_no_text(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt: it is not valid text"):
        byte_level.encode("\ud800")


MESSAGES = [
    {"role": "user", "content": "Hello <b> & 'you' 東京"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "More."},
]
TEMPLATES = {
    "plain": model_zoo.CHAT_TEMPLATE,
    "loop controls": "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
    "{{ m.content }}{% endfor %}{{ eos_token }}",
    "generation": "{% for m in messages %}\n  {% generation %}\n{{ m.content }}"
    "{% endgeneration %}\n{% endfor %}",
    "tojson": "{{ messages[0] | tojson }} {{ messages | tojson(indent=2) }}",
    "variables": "{% if tools is none and thinking %}{{ messages | length }}{% endif %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ strftime_now('%Y') }}",
}


def with_template(directory: Path, template: object) -> Tokenizer:
    source = model_zoo.model_directory("gpt2")
    (directory / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = json.loads((source / "tokenizer_config.json").read_text())
    config |= {"chat_template": template}
    config["eos_token"] = {"content": "<eos>", "lstrip": False}  # an older spelling
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_equals_transformers(tmp_path: Path, name: str, add_generation_prompt: bool) -> None:
    tokenizer = with_template(tmp_path, TEMPLATES[name])
    reference = transformers.AutoTokenizer.from_pretrained(model_zoo.model_directory("gpt2"))
    expected = reference.apply_chat_template(
        MESSAGES,
        chat_template=TEMPLATES[name],
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        thinking=True,
    )
    assert tokenizer.render_chat(MESSAGES, add_generation_prompt, thinking=True) == expected


@pytest.mark.parametrize("in_sequence", [False, True])
def test_special_tokens_that_are_put_around_texts_are_described(
    tmp_path: Path, in_sequence: bool
) -> None:
    """The library would panic at each text."""
    fields = json.loads((model_zoo.model_directory("gpt2") / "tokenizer.json").read_text())
    text = {"Sequence": {"id": "A", "type_id": 0}}
    begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    described = {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}}
    for special_tokens in (described, {}):
        template = {
            **{"type": "TemplateProcessing", "single": [begin, text], "pair": [text, text]},
            "special_tokens": special_tokens,
        }
        both = {"type": "Sequence", "processors": [template]}
        fields["post_processor"] = both if in_sequence else template
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
        if special_tokens:
            assert Tokenizer.from_directory(tmp_path).encode("a")[0] == 0
    message = r"tokenizer.json: post_processor has no '<bos>' in special_tokens"
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_where_templates_come_from(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    assert with_template(tmp_path, named).render_chat([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).render_chat([]) == "file"
    (tmp_path / "chat_template.jinja").unlink()
    for wrong in (3, [{"name": "tool_use", "template": 3}]):
        with pytest.raises(ModelError, match=r"chat_template is .*3.*; it must be a template"):
            with_template(tmp_path, wrong)


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize("in_files", [False, True])
def test_the_template_for_tools(
    tmp_path: Path, in_files: bool, tools: list[dict[str, Any]] | None
) -> None:
    by_name = {"tool_use": "tools {{ tools | length }}", "default": "plain", "rag": "{{ rag }}"}
    named = [{"name": name, "template": source} for name, source in by_name.items()]
    tokenizer = with_template(tmp_path, named)
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text("file")
        file = tmp_path / "additional_chat_templates" / "tool_use.jinja"
        file.write_text("file {{ tools | length }}")
        tokenizer = Tokenizer.from_directory(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<eos>"}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = reference.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert tokenizer.render_chat(MESSAGES, tools=tools) == expected
    assert tokenizer.template_variables == {"tools"}


def test_a_model_without_a_template(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="messages: the model has no chat template"):
        tokenizer.render_chat(MESSAGES)


def test_templates_that_fail(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the chat template is broken at line 2"):
        with_template(tmp_path, "first line\n{% for %}")
    for template in ("{{ raise_exception('roles must alternate') }}", "{{ messages[9].role.x }}"):
        with pytest.raises(InvalidRequest, match="messages: the chat template refused them"):
            with_template(tmp_path, template).render_chat(MESSAGES)


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    for template in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages.__class__.__base__ }}{{ cycler.__init__.__globals__ }}",
    ):
        with pytest.raises(InvalidRequest, match="refused"):
            with_template(tmp_path, template).render_chat(MESSAGES)
