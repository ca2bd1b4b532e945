"""Tokens and their log-probabilities, as text for replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.core.step import TokenLogprobs
from octavo.engine.tokenizer import Detokenizer, Tokenizer
from octavo.server.http.replies import (
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    ScoredToken,
    TopLogprob,
)

# JSON has no infinity; OpenAI writes this for a token that cannot be sampled.
LOWEST = -9999.0


class TokenTexts:
    """The texts of single tokens. Without a tokenizer, they are the token ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # filled as tokens appear
        self._byte_values: dict[int, list[int]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return str(token_id).encode()
        return self._tokenizer.token_bytes(token_id)

    def byte_values(self, token_id: int) -> list[int]:
        """The bytes as numbers: the same list each time, since a reply may have it many times."""
        known = self._byte_values.get(token_id)
        if known is None:
            known = self._byte_values[token_id] = list(self.bytes_of(token_id))
        return known

    def text(self, token_id: int) -> str:
        """A piece of a character is written as `bytes:\\x..`, as OpenAI does."""
        known = self._texts.get(token_id)
        if known is None:
            data = self.bytes_of(token_id)
            try:
                known = data.decode()
            except UnicodeDecodeError:
                known = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = known
        return known

    def detokenizer(self, prompt: Sequence[int], skip_special_tokens: bool) -> Detokenizer | None:
        """What makes the text of tokens that follow a prompt; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.detokenizer(prompt, skip_special_tokens)

    def prompt_logprobs(self, scores: Sequence[TokenLogprobs | None], count: int) -> PromptLogprobs:
        """Scores at each place: of the token itself, and of the `count` likeliest ones."""
        return [None if score is None else self._scored(score, count) for score in scores]

    def chat_logprobs(self, scores: Iterable[TokenLogprobs]) -> list[ChatTokenLogprob]:
        entries = []
        for score in scores:
            top = [
                TopLogprob(self.text(token), _finite(value), self.byte_values(token))
                for token, value in score.top
            ]
            data = self.byte_values(score.token_id)
            entries.append(
                ChatTokenLogprob(self.text(score.token_id), _finite(score.logprob), data, top)
            )
        return entries

    def _scored(self, score: TokenLogprobs, count: int) -> dict[str, ScoredToken]:
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(score.top[:count], 1)}
        ranked.setdefault(score.token_id, (score.logprob, score.rank))
        return {
            str(token): ScoredToken(_finite(value), rank, self.text(token))
            for token, (value, rank) in ranked.items()
        }


class TokenIds(TokenTexts):
    """Token ids in place of the texts, as vLLM writes them; no two tokens look alike."""

    def text(self, token_id: int) -> str:
        return f"token_id:{token_id}"


class CompletionScores:
    """Collects the logprobs of one choice of a completion, piece by piece.

    Owns the place in the choice's text, which goes on from one piece of a stream to the next.
    """

    def __init__(
        self, texts: TokenTexts, count: int, detokenizer: Detokenizer | None, offset: int = 0
    ) -> None:
        """
        Args:
            texts: of the tokens.
            count: how many of the likeliest tokens are given at each place.
            detokenizer: makes the choice's text of its tokens; None: it has no text.
            offset: where in the text the first token begins.
        """
        self._texts = texts
        self._count = count
        self._detokenizer = detokenizer
        self._offset = offset  # characters

    def prompt(
        self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """The scores of an echoed prompt. Its first token has no predecessor, so it has none."""
        entries = CompletionLogprobs([], [], [], [])
        for token_id, score in zip(token_ids, scores, strict=True):
            self._add(entries, token_id, score)
        return entries

    def output(self, scores: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """The scores of the output's next tokens."""
        entries = CompletionLogprobs([], [], [], [])
        for score in scores:
            self._add(entries, score.token_id, score)
        return entries

    def _add(self, entries: CompletionLogprobs, token_id: int, score: TokenLogprobs | None) -> None:
        text = self._texts.text
        entries.tokens.append(text(token_id))
        entries.text_offset.append(self._offset)
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.add(token_id))
        if score is None:
            entries.token_logprobs.append(None)
            entries.top_logprobs.append(None)
            return
        entries.token_logprobs.append(_finite(score.logprob))
        top: dict[str, float] = {}
        # Tokens with the same text are one key here: the likeliest is kept.
        for other, value in score.top[: self._count]:
            top.setdefault(text(other), _finite(value))
        top.setdefault(text(token_id), _finite(score.logprob))
        entries.top_logprobs.append(top)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of `first`, then those of `second`."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
