"""The policy on a vLLM server, by its HTTP interface as in vLLM 0.33: completions of token ids, and
an adapter for each version of the policy.
"""

import asyncio
import contextlib
import http.client
import json
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.config import Config
from jaxlc.core import raise_all, reason_of
from jaxlc.data.sequences.user_batches import check_range
from jaxlc.data.tokens.encoder import Stops
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.interrupts import in_thread
from jaxlc.posttrain.agents import FAILED, SamplerError, Teacher, Turn, in_background
from jaxlc.posttrain.records import TEACHER_FIELDS, encoded_array, stored_array
from jaxlc.runtime.watchdog import on_process_0

KEY_VARIABLE = "VLLM_API_KEY"  # the environment variable that vLLM reads, too
_RETRY_SECONDS = 0.5
# of a proxy, such as with a limit of its rate
_BUSY = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
_PROBE_TEXT = " 1234567 caf\u00e9 \u4f60\u597d\n\n\tx"
# vLLM would take others from the model's generation_config.json
_PLAIN_SAMPLING = dict(top_k=0, min_p=0.0, repetition_penalty=1.0)


class _Refused(SamplerError):
    """The server refuses a request, with an HTTP status from 400 to 500."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server of config.rollouts.server, or that of a teacher."""

    url: str
    config: Config
    tokenizer: Tokenizer
    stops: Stops | None = None  # None: of a teacher, which is not sampled

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, as JSON if it is; GET without a body. It is repeated while the
        server cannot be reached or has an error of its own.

        Raises:
          SamplerError: there is no answer within rollouts.server_seconds.
          _Refused: the server refuses the request.
        """
        limit = self.config.rollouts.server_seconds
        reason = "the request is still running"
        try:
            async with asyncio.timeout(limit):
                while True:
                    try:
                        return await asyncio.wrap_future(in_thread(lambda: self._send(path, body)))
                    except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                        reason = reason_of(error)
                    await asyncio.sleep(_RETRY_SECONDS)
        except TimeoutError:
            raise SamplerError(
                f"the server {self.url} gave no answer to {path} in {limit:g} s"
                f" (config.rollouts.server_seconds, or --server_seconds of jaxlc logprobs; {reason}): start it"
                " again, then run the same command again to resume"
            ) from None

    def _send(self, path: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url.rstrip("/") + path, data, headers)
        seconds = self.config.rollouts.server_seconds  # without bytes
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                content = response.read()
                is_json = response.headers.get_content_type() == "application/json"
                return json.loads(content) if is_json else content.decode()
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")[:500]
            # 500: an adapter that vLLM cannot load; 502 and more: it is not ready
            if error.code <= 500 and error.code not in _BUSY:
                is_locked = error.code == http.client.UNAUTHORIZED
                advice = f": set {KEY_VARIABLE} to its API key" if is_locked else ""
                raise _Refused(
                    error.code,
                    f"the server {self.url} refuses {path} (HTTP {error.code}: {message}){advice}",
                ) from error
            raise

    async def load(self, name: str, adapter: Path) -> None:
        """Loads an adapter, unless the server has one of its name.

        Raises:
          SamplerError: the server refuses it.
        """
        try:
            await self.post("/v1/load_lora_adapter", dict(lora_name=name, lora_path=str(adapter)))
        except _Refused as error:
            if "already been loaded" not in str(error):
                raise SamplerError(
                    f"the server {self.url} does not load the adapter {adapter} ({error}): start it"
                    f" with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank of at least"
                    f" {self.config.lora.rank}, where it sees this directory"
                ) from error

    async def unload(self, directory: Path, first: int) -> None:
        """Unloads the versions of a directory before `first`, also those that an earlier process
        has loaded.
        """
        for model in (await self.post("/v1/models"))["data"]:
            path = Path(model["root"])
            is_version = path.parent == directory and path.name.isdigit()
            if is_version and int(path.name) < first:
                with contextlib.suppress(_Refused):  # it is not loaded any more
                    await self.post("/v1/unload_lora_adapter", dict(lora_name=model["id"]))

    async def sample(
        self, name: str, adapter: Path, seed: int, ids: np.ndarray, max_tokens: int, index: int
    ) -> Turn:
        """The answer of an adapter, which is loaded again if the server has been restarted.

        Args:
          seed: of 32 bits; with the index, it is what the own sampler uses.
        """
        config = self.config
        body = dict(
            model=name,
            prompt=ids.tolist(),
            max_tokens=max_tokens,
            temperature=config.posttrain.temperature,
            top_p=config.rollouts.top_p,
            seed=(seed << 31) + index,  # of the 63 bits that a server takes
            logprobs=1,
            return_token_ids=True,
            stop=self.stops.texts,
            stop_token_ids=self.stops.ids,
            **_PLAIN_SAMPLING,
        )
        try:
            choice = await self._completed(body)
        except _Refused as error:
            if error.status != http.client.NOT_FOUND:
                raise
            await self.load(name, adapter)
            choice = await self._completed(body)
        if choice["prompt_token_ids"] != body["prompt"]:
            raise SamplerError("the server has changed the token ids of a prompt")
        if choice["finish_reason"] not in ("stop", "length"):
            raise SamplerError(f"the server ended a completion by {choice['finish_reason']!r}")
        experts = None
        if self.config.posttrain.replay_routing:
            experts = stored_array(choice, "routed_experts", f"an answer of {self.url}")
        return Turn(
            tokens=np.array(choice["token_ids"], np.int32),
            log_probs=np.array(choice["logprobs"]["token_logprobs"], np.float32),
            text=choice["text"],
            reason=choice["finish_reason"],
            experts=experts,
        )

    async def _completed(self, body: dict[str, Any]) -> dict[str, Any]:
        return (await self.post("/v1/completions", body))["choices"][0]

    async def scores(
        self, tokens: np.ndarray, in_loss: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each of the n tokens in the loss: its log-probability, float32 [n], the
        posttrain.teacher_top_k most probable tokens, int32 [n, k], and their log-probabilities.

        Raises:
          SamplerError: the server does not give them.
          UserError: it has another vocabulary.
        """
        top_k = self.config.posttrain.teacher_top_k
        body = dict(prompt=tokens.tolist(), max_tokens=1, prompt_logprobs=top_k)
        try:
            rows = np.extract(in_loss, (await self._completed(body))["prompt_logprobs"])
            own = [row[str(token)]["logprob"] for row, token in zip(rows, tokens[in_loss])]
            pairs = [
                sorted((-x["logprob"], int(i)) for i, x in row.items())[:top_k] for row in rows
            ]
            minus_log_probs, best = np.reshape(pairs, (len(rows), top_k, 2)).transpose(2, 0, 1)
        except (_Refused, LookupError, ValueError) as error:
            raise SamplerError(
                f"the server {self.url} does not give {top_k} log-probabilities for each token of a"
                f" prompt ({reason_of(error)}): start it with --max-logprobs={top_k} or more, and a"
                f" --max-model-len of more than {len(tokens)}"
            ) from error
        end = self.config.model.vocab_size
        expected = "a model with the vocabulary of the tokenizer"
        check_range("token", best, end, f"answer of the server {self.url}", expected)
        return np.float32(own), best.astype(np.int32), -minus_log_probs.astype(np.float32)

    async def taught(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record of an answer, with the candidates of a teacher for the tokens in the loss.

        Raises:
          SamplerError, UserError: as `scores`.
        """
        if FAILED in record:  # it may have no tokens
            return record
        in_loss = np.array(record["loss_mask"], bool)
        _, *arrays = await self.scores(np.array(record["tokens"]), in_loss)
        values = *map(encoded_array, arrays), self.tokenizer.fingerprint
        return record | dict(zip(TEACHER_FIELDS, values))

    async def check(self, text: str = "") -> str:
        """Probes the server with a text. Returns the name of its model.

        Raises:
          UserError: how to start it instead.
          SamplerError: it cannot be reached.
        """
        models = (await self.post("/v1/models"))["data"]
        name = models[0]["id"]
        text = text[:1000] + _PROBE_TEXT
        ids = self.tokenizer.encode(text.encode())
        body = dict(model=name, prompt=text, add_special_tokens=False)
        theirs = (await self.post("/tokenize", body))["tokens"]
        longest = max(model.get("max_model_len") or 0 for model in models)
        data = self.config.data
        needed = data.seq_len + (1 if self.stops else 2)  # a teacher makes one more
        problems = {  # whether the server has them
            f"has max_model_len={longest}: start it with --max-model-len={needed} or more": (
                longest < needed
            ),
            f"has another tokenizer: start it with the one of config.data.tokenizer={data.tokenizer!r}": (
                theirs != ids.tolist()
            ),
        }
        if self.stops:
            problems |= await self._policy_problems(name, ids[:8].tolist())
        found = [problem for problem, has_it in problems.items() if has_it]
        raise_all(f"the server {self.url} {problem}" for problem in found)
        if not self.stops:
            await self.scores(ids[:8], np.arange(len(ids[:8])) > 0)
        return name

    async def _policy_problems(self, name: str, ids: list[int]) -> dict[str, Any]:
        body = dict(
            model=name,
            prompt=ids,
            max_tokens=1,
            logprobs=5,
            seed=0,
            top_p=1.0,
            return_token_ids=True,
            **_PLAIN_SAMPLING,
        )
        choices = [await self._completed(body | dict(temperature=x)) for x in (1.0, 0.5)]
        # log-probabilities at half the temperature differ by twice as much
        spreads = [np.ptp([*x["logprobs"]["top_logprobs"][0].values()]) for x in choices]
        needs_experts = self.config.posttrain.replay_routing
        return {
            "returns log-probabilities before the temperature: start it with --logprobs-mode=processed_logprobs": (
                not np.isclose(spreads[1], 2 * spreads[0], rtol=0.05, atol=0.02)
            ),
            "returns no token ids: use vLLM 0.33 or a later version": not choices[0].get(
                "token_ids"
            ),
            "returns no experts: start it with --enable-return-routed-experts": (
                needs_experts and not choices[0].get("routed_experts")
            ),
        }


def open_teacher(config: Config, tokenizer: Tokenizer, text: str) -> Teacher | None:
    """`Server.taught` of config.rollouts.teacher_server, after process 0 probed it with a text; None without
    one.

    Raises:
      UserError: as `Server.check`, in all processes.
    """
    if not config.rollouts.teacher_server:
        return None
    teacher = Server(url=config.rollouts.teacher_server, config=config, tokenizer=tokenizer)
    on_process_0(lambda: in_background(teacher.check(text)).result())
    return teacher.taught
