"""Tokens that the files beside a tokenizer's own add to it: those that tokenizer_config.json
describes by their ids (`added_tokens_decoder`), or that added_tokens.json of older directories
names, and those that have a role ("eos_token") there or in special_tokens_map.json.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from octavo.errors import ModelError, shown
from octavo.json_fields import Fields, is_text, read_optional_json

_FIRST_ROLES = tuple(f"{role}_token" for role in ["bos", "eos", "unk", "sep", "pad", "cls", "mask"])
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def described_tokens(config: Fields, **always: bool) -> dict[AddedToken, int] | None:
    """Those that tokenizer_config.json describes, with their ids; None if it describes none.

    `always`: what holds for all of them, whatever is said.
    """
    if config.get("added_tokens_decoder", None) is None:
        return None
    decoder, ids = config.part("added_tokens_decoder"), {}
    for number in decoder.values:
        fields = decoder.part(number)
        if not (number.isascii() and number.isdecimal() and len(number) < 10):
            raise ModelError(f"{decoder.where}: {shown(number)} is no token id")
        special = fields.flag("special", False)
        ids[_described(fields, **{"special": special} | always)] = int(number)
    return ids


def older_tokens(config: Fields, directory: Path, **always: bool) -> dict[AddedToken, int]:
    """Those of added_tokens.json, with their ids. The ones that have a role are special."""
    special = {token.content for token in role_tokens(config, directory)}
    file, ids = read_optional_json(directory / "added_tokens.json"), {}
    for text, number in file.values.items():
        if type(number) is not int:
            raise ModelError(
                f"{file.where}: {shown(text)} is {shown(number)}, which is no token id"
            )
        ids[_added_token(file, text, special=text in special, **always)] = number
    return ids


def special_tokens(config: Fields, directory: Path) -> dict[str, str]:
    """Role -> token, of every "..._token"."""
    return {role: token.content for role, token in _roles(_options(config, directory)).items()}


def role_tokens(config: Fields, directory: Path) -> list[AddedToken]:
    """The tokens that have a role, and those that are special without one."""
    options = _options(config, directory)
    name = "extra_special_tokens"
    if not options.get(name, None):
        name = "additional_special_tokens"  # the older spelling
    extra = options.get(name, [])
    return [*_roles(options).values(), *_tokens(options, name, extra)]


def complete(tokenizer: Tokenizer, directory: Path) -> None:
    """Add what tokenizer.json lacks of the tokens that the files beside it name, as transformers
    does: in the order of their ids, and then those with a role.

    Raises ModelError if a file is broken.
    """
    config = read_optional_json(directory / "tokenizer_config.json")
    tokens = described_tokens(config)
    if tokens is None:
        by_id = {number: token for token, number in older_tokens(config, directory).items()}
        by_id |= tokenizer.get_added_tokens_decoder()
    else:
        by_id = {number: token for token, number in tokens.items()}
    added = [by_id[number] for number in sorted(by_id)]
    tokenizer.add_tokens(added)
    known = {token.content: token for token in added}
    special = [known.get(token.content, token) for token in role_tokens(config, directory)]
    tokenizer.add_special_tokens(special)


def _options(config: Fields, directory: Path) -> Fields:
    """tokenizer_config.json, with special_tokens_map.json if it is one of older directories."""
    if config.get("added_tokens_decoder", None) is not None:
        return config
    roles = read_optional_json(directory / "special_tokens_map.json")
    return Fields(config.where or roles.where, config.values | roles.values)


def _roles(options: Fields) -> dict[str, AddedToken]:
    named = {role: value for role, value in options.values.items() if role.endswith("_token")}
    extra = options.get("extra_special_tokens", None)
    if isinstance(extra, dict):
        named |= extra
    first = [role for role in _FIRST_ROLES if role in named]
    ordered = dict.fromkeys([*first, *named])
    return {role: token for role in ordered for token in _tokens(options, role, [named[role]])}


def _tokens(options: Fields, name: str, values: Any) -> Iterable[AddedToken]:
    """Those of a list of tokens, which are strings or objects; what is neither is no token."""
    for value in values if isinstance(values, list) else ():
        content = value.get("content") if isinstance(value, dict) else value
        if not isinstance(content, str) or not content:
            continue
        if not is_text(content):
            raise ModelError(f"{options.where}: {name} is {shown(content)}; it is not valid text")
        fields = Fields(f"{options.where}: {name}", value if isinstance(value, dict) else {})
        yield _described(fields.with_defaults({"content": content}), special=True)


def _described(fields: Fields, **always: bool) -> AddedToken:
    """What is not said of a token is left to the library."""
    said = [name for name in _FLAGS if fields.get(name, None) is not None]
    flags = {name: fields.flag(name, False) for name in said}
    return _added_token(fields, fields.get("content"), **flags | always)


def _added_token(fields: Fields, text: object, **flags: bool) -> AddedToken:
    """Raises ModelError if the token cannot be in a text."""
    if not is_text(text) or not text:
        raise ModelError(f"{fields.where}: the added token {shown(text)} is not valid text")
    return AddedToken(str(text), **flags)
