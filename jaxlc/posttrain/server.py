"""The policy on a vLLM server, by its HTTP interface as in vLLM 0.33: completions of token ids, and
an adapter for each version of the policy.
"""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxlc.config import Config
from jaxlc.core.errors import raise_all, reason_of
from jaxlc.data.tokens.encoder import Stops
from jaxlc.data.tokens.tokenizers import Tokenizer
from jaxlc.posttrain.agents import FAILED, Request, SamplerError, Teacher, Turn
from jaxlc.posttrain.records import TEACHER_FIELDS, encoded_array
from jaxlc.posttrain.rewards import in_thread
from jaxlc.posttrain.rollouts import on_process_0
from jaxlc.posttrain.traces import Prompt

KEY_VARIABLE = "VLLM_API_KEY"  # the environment variable that vLLM reads, too
_RETRY_SECONDS = 0.5
_PROBE_TEXT = " 1234567 caf\u00e9 \u4f60\u597d\n\n\tx"
# vLLM would take others from the model's generation_config.json
_PLAIN_SAMPLING = dict(top_k=0, min_p=0.0, repetition_penalty=1.0)


class _Refused(Exception):
    """An HTTP status from 400 to 500, and the message of the server."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Server:
    """The server of config.rollouts.server, or that of a teacher."""

    url: str
    config: Config
    stops: Stops

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, as JSON if it is; GET without a body. It is repeated while the
        server cannot be reached or has an error of its own.

        Raises:
          SamplerError: there is no answer within rollouts.server_seconds.
          _Refused: the server refuses the request.
        """
        limit = self.config.rollouts.server_seconds
        end, reason = time.monotonic() + limit, ""
        while (left := end - time.monotonic()) > 0:
            try:
                return await asyncio.wrap_future(in_thread(lambda: self._send(path, body, left)))
            except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
                reason = reason_of(error)
            await asyncio.sleep(_RETRY_SECONDS)
        raise SamplerError(
            f"the server {self.url} gave no answer to {path} in {limit:g} s"
            f" (config.rollouts.server_seconds; {reason}): start it again, then run the same command again to resume"
        )

    def _send(self, path: str, body: dict[str, Any] | None, seconds: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        url = self.url.rstrip("/") + path
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers), timeout=seconds
            ) as response:
                content = response.read()
                is_json = response.headers.get_content_type() == "application/json"
                return json.loads(content) if is_json else content.decode()
        except urllib.error.HTTPError as error:
            message = error.read().decode(errors="replace")[:500]
            # 500: an adapter that vLLM cannot load; 502 and more: it is not ready
            if error.code <= 500:
                raise _Refused(error.code, message) from error
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
            if path.parent == directory and int(path.name) < first:
                with contextlib.suppress(_Refused):  # it is not loaded any more
                    await self.post("/v1/unload_lora_adapter", dict(lora_name=model["id"]))

    async def complete(self, request: Request, name: str, adapter: Path, seed: int) -> Turn:
        """The answer of an adapter, which is loaded again if the server has been restarted."""
        config = self.config
        body = dict(
            model=name,
            prompt=request.ids.tolist(),
            max_tokens=request.max_tokens,
            temperature=config.posttrain.temperature,
            top_p=config.rollouts.top_p,
            seed=seed,
            logprobs=1,
            return_token_ids=True,
            stop=self.stops.texts,
            stop_token_ids=self.stops.ids,
            **_PLAIN_SAMPLING,
        )
        for has_loaded in (False, True):
            try:
                answer = await self.post("/v1/completions", body)
                return self._turn(request, answer["choices"][0])
            except _Refused as error:
                if has_loaded or error.status != http.client.NOT_FOUND:
                    raise SamplerError(
                        f"the server {self.url} refuses a completion: {error}"
                    ) from error
            await self.load(name, adapter)
        raise AssertionError

    def _turn(self, request: Request, choice: dict[str, Any]) -> Turn:
        if choice["prompt_token_ids"] != request.ids.tolist():
            raise SamplerError("the server has changed the token ids of a prompt")
        if choice["finish_reason"] not in ("stop", "length"):
            raise SamplerError(f"the server ended a completion by {choice['finish_reason']!r}")
        experts = choice.get("routed_experts")
        if experts is not None:
            experts = np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
        return Turn(
            tokens=np.array(choice["token_ids"], np.int32),
            log_probs=np.array(choice["logprobs"]["token_logprobs"], np.float32),
            text=choice["text"],
            reason=choice["finish_reason"],
            experts=experts if self.config.posttrain.replay_routing else None,
        )

    async def taught(self, tokenizer: Tokenizer, record: dict[str, Any]) -> dict[str, Any]:
        """The record of an answer, with the candidates of a teacher for the tokens in the loss.

        Raises:
          SamplerError: the server gives fewer candidates than posttrain.teacher_top_k.
        """
        if FAILED in record:  # it may have no tokens
            return record
        top_k = self.config.posttrain.teacher_top_k
        body = dict(prompt=record["tokens"], max_tokens=1, prompt_logprobs=top_k)
        try:
            choice = (await self.post("/v1/completions", body))["choices"][0]
            rows = np.extract(record["loss_mask"], choice["prompt_logprobs"])
            pairs = [
                sorted((x["logprob"], int(i)) for i, x in row.items())[-top_k:] for row in rows
            ]
            log_probs, tokens = np.reshape(pairs, (-1, top_k, 2)).transpose(2, 0, 1)
        except (_Refused, LookupError, ValueError) as error:
            raise SamplerError(
                f"the server {self.url} does not give {top_k} log-probabilities for each token of a"
                f" prompt ({reason_of(error)}): start it with --max-logprobs={top_k} or more"
            ) from error
        arrays = map(encoded_array, (tokens.astype(np.int32), log_probs.astype(np.float32)))
        return record | dict(zip(TEACHER_FIELDS, (*arrays, tokenizer.fingerprint)))

    async def check(self, tokenizer: Tokenizer, prompt: Prompt, is_teacher: bool = False) -> None:
        """Probes the server, of the policy or of a teacher.

        Raises:
          UserError: how to start it instead.
          SamplerError: it cannot be reached.
        """
        models = (await self.post("/v1/models"))["data"]
        name = models[0]["id"]
        text = prompt.text[:1000] + _PROBE_TEXT
        body = dict(model=name, prompt=text, add_special_tokens=False)
        tokens = (await self.post("/tokenize", body))["tokens"]
        choices = []
        if is_teacher:
            ids = prompt.ids.tolist()
            await self.taught(tokenizer, dict(tokens=[*ids, 0], loss_mask=[0] * len(ids) + [1]))
        for temperature in () if is_teacher else (1.0, 0.5):
            body = dict(model=name, prompt=prompt.ids.tolist(), max_tokens=1, logprobs=5)
            body |= dict(temperature=temperature, seed=0, top_p=1.0, **_PLAIN_SAMPLING)
            choices.append((await self.post("/v1/completions", body))["choices"][0])
        longest = max(model.get("max_model_len") or 0 for model in models)
        ours = tokenizer.encode(text.encode()).tolist()
        raise_all(
            f"the server {self.url} {problem}"
            for problem in self._problems(longest, tokens == ours, choices)
        )

    def _problems(
        self, longest: int, has_tokenizer: bool, choices: list[dict[str, Any]]
    ) -> Iterator[str]:
        config = self.config
        needed = config.data.seq_len + (1 if choices else 2)
        if longest < needed:
            yield f"has max_model_len={longest}: start it with --max-model-len={needed} or more"
        if not has_tokenizer:
            yield f"has another tokenizer: start it with the one of config.data.tokenizer={config.data.tokenizer!r}"
        if not choices:
            return
        # log-probabilities at half the temperature differ by twice as much
        spreads = [np.ptp([*x["logprobs"]["top_logprobs"][0].values()]) for x in choices]
        if not np.isclose(spreads[1], 2 * spreads[0], rtol=0.05, atol=0.02):
            yield (
                "returns log-probabilities before the temperature: start it with --logprobs-mode=processed_logprobs"
            )
        if config.posttrain.replay_routing and not choices[0].get("routed_experts"):
            yield "returns no experts: start it with --enable-return-routed-experts"


def open_teacher(config: Config, tokenizer: Tokenizer, prompt: Prompt) -> Teacher | None:
    """`Server.taught` of config.rollouts.teacher_server, after it was probed by process 0; None without one.

    Raises:
      UserError: as `Server.check`, in all processes.
    """
    if not config.rollouts.teacher_server:
        return None
    teacher = Server(url=config.rollouts.teacher_server, config=config, stops=Stops([], []))
    probe = partial(teacher.check, tokenizer, prompt, True)
    # in a thread, since a notebook has an event loop
    on_process_0(lambda: in_thread(lambda: asyncio.run(probe())).result())
    return partial(teacher.taught, tokenizer)
