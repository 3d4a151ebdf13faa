"""A checked line -> a `Request`: template, tokens, the line's options over the job's defaults, and the key of its random stream."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace

import xxhash

from dspark.runtime.jobs.lines import JobLine, LineError
from dspark.runtime.jobs.tokenizer import TextCodec
from dspark.runtime.spec.errors import RequestError
from dspark.runtime.spec.request import Request
from dspark.runtime.spec.sampling_params import SamplingParams

CHARACTERS_PER_TOKEN = 16
"""A text with more characters than this per token of context is first tokenized in part (see `_encode`)."""


class PromptBuilder:
    """Builds the requests of one job.

    defaults: what a line that says nothing gets. max_model_len: prompt and answer together, in tokens. vocab_size: rows of the
    model's embedding (the tokenizer may know more). job_seed: 0 to 2**64 - 1.
    """

    def __init__(self, codec: TextCodec, defaults: SamplingParams, max_model_len: int, vocab_size: int, job_seed: int = 0) -> None:
        self._codec = codec
        self._defaults = defaults
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._job_seed = job_seed

    def build(self, line: JobLine, request_id: int) -> Request:
        """The line's request. Raises LineError when the engine can never serve it."""
        try:
            token_ids = self._tokens(line)
            params = self._params(line, len(token_ids))
        except RequestError as error:
            raise LineError.at(line, error) from error
        return Request(request_id, token_ids, params, draw_key(line, token_ids, self._job_seed))

    def _tokens(self, line: JobLine) -> list[int]:
        if line.messages is not None:
            text = self._codec.render_chat(line.messages, line.add_generation_prompt)
            param, token_ids = "messages", self._encode(text, "messages", add_special_tokens=False)
        elif isinstance(line.prompt, str):
            param, token_ids = "prompt", self._encode(line.prompt, "prompt", add_special_tokens=True)
        else:
            param, token_ids = "prompt", list(line.prompt or ())
        if not token_ids:
            raise RequestError(f"{param} has no tokens, allowed: at least one", "empty_prompt", param)
        if len(token_ids) >= self._max_model_len:
            raise self._too_long(param, f"{len(token_ids)} tokens")
        if max(token_ids) >= self._vocab_size or min(token_ids) < 0:
            raise self._out_of_range(param, token_ids, is_text=line.messages is not None or isinstance(line.prompt, str))
        return token_ids

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Token ids of the text; a text of megabytes is refused without tokenizing all of it.

        How few tokens a text can have is not to be read off its length (runs of blanks may be one token), so growing beginnings
        are tokenized. The cut spoils the token it falls into, which then is as many tokens as it has bytes, and perhaps a few
        before it: whatever exceeds that and twice the context cannot fit.
        """
        size = CHARACTERS_PER_TOKEN * self._max_model_len
        while size < len(text):
            count = len(self._codec.encode(text[:size]))
            if count >= 2 * self._max_model_len + 4 * self._codec.longest_token:
                raise self._too_long(param, f"{len(text)} characters, the first {size} of them {count} tokens")
            size *= 2
        return self._codec.encode(text, add_special_tokens)

    def _too_long(self, param: str, size: str) -> RequestError:
        limit = self._max_model_len
        return RequestError(
            f"{param} is too long: {size}, allowed: up to {limit - 1} tokens (the context is {limit}, prompt and answer together)",
            "prompt_too_long",
            param,
        )

    def _out_of_range(self, param: str, token_ids: list[int], is_text: bool) -> RequestError:
        index, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
        if is_text:
            message = (
                f"{param} holds {self._codec.id_to_token(token)!r}, token {token}, which the model does not have: "
                f"the tokenizer knows {self._codec.vocab_size} tokens, the model {self._vocab_size}"
            )
        else:
            message = f"{param}[{index}] is {token}, allowed: a token id from 0 to {self._vocab_size - 1}"
        return RequestError(message, "token_out_of_range", param)

    def _params(self, line: JobLine, num_prompt_tokens: int) -> SamplingParams:
        """The line's options over the defaults; max_tokens capped so that prompt and answer fit the context."""
        params = replace(self._defaults, **line.options)
        room = self._max_model_len - num_prompt_tokens
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, allowed: up to max_tokens, which is {params.max_tokens}", "invalid_value", "min_tokens"
            )
        for param, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [token for token, _ in params.logit_bias])):
            for token in ids:
                if token >= self._vocab_size:
                    raise RequestError(f"{param} has {token}, allowed: token ids from 0 to {self._vocab_size - 1}", "invalid_value", param)
        return replace(params, max_tokens=room if params.max_tokens is None else min(params.max_tokens, room))


def draw_key(line: JobLine, token_ids: list[int], job_seed: int) -> int:
    """What the request's random stream depends on, as 128 bits: (seed, prompt) when the line has a seed, else (job seed, id, prompt)."""
    seed = line.options.get("seed")
    tokens = array("I", token_ids)
    if sys.byteorder == "big":
        tokens.byteswap()
    if seed is not None:
        head = b"seed" + seed.to_bytes(8, "little")
    else:
        custom_id = line.custom_id.encode()
        head = b"job\0" + job_seed.to_bytes(8, "little") + len(custom_id).to_bytes(8, "little") + custom_id
    return xxhash.xxh3_128_intdigest(head + tokens.tobytes())
