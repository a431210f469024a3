"""A stand-in for a vLLM server, for tests: the same requests get the same answers, which depend on the
bytes of the adapter, the token ids, the seed and the temperature.

    python scripts/stand_in_server.py --port=8000

It has the endpoints and fields of vLLM 0.33 that `jaxlc.posttrain.server` uses, and no model. GET /log returns
the requests so far.
"""

import argparse
import base64
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

# (body of the request) -> token ids, log-probabilities, text, finish reason
Answer = Callable[[Mapping[str, Any]], tuple[list[int], list[float], str, str]]


class StandIn(ThreadingHTTPServer):
    """Listens on a port of the loopback interface."""

    daemon_threads = True
    # changed by tests
    vocab_size = 256
    max_model_len = 1 << 20
    scales_log_probs = True  # --logprobs-mode=processed_logprobs
    max_lora_rank = 1 << 10
    is_updatable = True  # VLLM_ALLOW_RUNTIME_LORA_UPDATING
    token_shift = 0  # of another tokenizer
    returns_token_ids = True  # False: an old version
    delay_seconds = 0.0
    byte_seconds = 0.0  # between the bytes of an answer
    num_errors = 0  # answers with `error_status` before others
    error_status = 503
    locked = ""  # a path that needs an API key
    answer: Answer | None = None
    max_logprobs = 20  # --max-logprobs
    # layers, experts of a layer, experts of a token: --enable-return-routed-experts
    experts: tuple[int, int, int] | None = None

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), _Handler)
        self.adapters: dict[str, Path] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "StandIn":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *args: object) -> None:
        """A client that is killed closes its connection."""

    def completed(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The choice of a completion."""
        if (top_k := body.get("prompt_logprobs")) is not None:
            tokens = body["prompt"]
            return dict(
                prompt_logprobs=[self.candidates(tokens, i, top_k) for i in range(len(tokens))]
            )
        answer = self.answer or self._pseudorandom
        tokens, log_probs, text, reason = answer(body)
        temperature = body["temperature"] if self.scales_log_probs else 1.0
        top = {f"token_id:{i}": -i / temperature for i in range(body["logprobs"])}
        ids = dict(token_ids=tokens, prompt_token_ids=body["prompt"])
        return dict(
            index=0,
            text=text,
            **(ids if self.returns_token_ids and body.get("return_token_ids") else {}),
            finish_reason=reason,
            logprobs=dict(token_logprobs=log_probs, top_logprobs=[top] * len(tokens)),
            routed_experts=self.routed(body["prompt"] + tokens),
        )

    def candidates(self, tokens: list[int], i: int, top_k: int) -> dict[str, Any] | None:
        """The log-probabilities of token i and of the most probable ones, from the tokens before it."""
        if not i:
            return None
        rng = np.random.default_rng(tokens[:i])
        log_probs = np.log(rng.dirichlet(np.full(self.vocab_size, 0.1)) + 1e-9)
        best = np.argsort(-log_probs)[:top_k].tolist()
        return {
            str(token): dict(logprob=float(log_probs[token]), rank=rank, decoded_token="")
            for rank, token in enumerate(dict.fromkeys([*best, tokens[i]]), start=1)
        }

    def routed(self, tokens: list[int]) -> str | None:
        """The bytes of a .npy file: different experts for each token and layer."""
        if self.experts is None:
            return None
        num_layers, num_experts, num_chosen = self.experts
        first = np.add.outer(np.cumsum(tokens[:-1]), np.arange(num_layers))
        file = io.BytesIO()
        np.save(file, (first[..., None] + np.arange(num_chosen)) % num_experts)
        return base64.b64encode(file.getvalue()).decode()

    def _pseudorandom(self, body: Mapping[str, Any]) -> tuple[list[int], list[float], str, str]:
        adapter = self.adapters.get(body["model"])
        weights = (adapter / "adapter_model.safetensors").read_bytes() if adapter else b""
        fields = [body[name] for name in ("prompt", "seed", "temperature", "max_tokens")]
        digest = hashlib.sha256(weights + json.dumps(fields).encode()).digest()
        rng = np.random.default_rng(np.frombuffer(digest, np.uint32))
        num_tokens = int(rng.integers(1, body["max_tokens"] + 1))
        tokens = rng.integers(97, min(123, self.vocab_size), num_tokens).tolist()
        log_probs = (-rng.uniform(0.1, 6.0, num_tokens)).tolist()
        reason = "length" if num_tokens == body["max_tokens"] else "stop"
        return tokens, log_probs, bytes(tokens).decode(), reason


class _Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        if self.path == "/log":
            self._send(200, self.server.log)
            return
        models = [dict(id="base", root="base", max_model_len=self.server.max_model_len)]
        for name, path in list(self.server.adapters.items()):
            models.append(dict(id=name, root=str(path), parent="base", max_model_len=None))
        self._send(200, dict(object="list", data=models))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        server.log.append((self.path, body))
        if server.num_errors:
            server.num_errors -= 1
            self._send(server.error_status, dict(error=dict(message="overloaded")))
        elif self.path == server.locked:
            self._send(401, dict(error="Unauthorized"))
        elif self.path == "/tokenize":
            tokens = [token + server.token_shift for token in body["prompt"].encode()]
            self._send(200, dict(tokens=tokens, count=len(tokens)))
        elif self.path == "/v1/completions":
            time.sleep(server.delay_seconds)
            if body.get("model", "base") not in ("base", *server.adapters):
                message = f"The model `{body['model']}` does not exist."
                self._send(404, dict(error=dict(message=message)))
                return
            if body.get("prompt_logprobs", 0) > server.max_logprobs:
                message = f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed"
                self._send(400, dict(error=dict(message=message)))
                return
            self._send(200, dict(choices=[server.completed(body)]))
        elif self.path == "/v1/unload_lora_adapter" and server.is_updatable:
            self._unload(body["lora_name"])
        elif self.path == "/v1/load_lora_adapter" and server.is_updatable:
            self._load(body["lora_name"], Path(body["lora_path"]))
        else:
            self._send(404, dict(detail="Not Found"))

    def _load(self, name: str, path: Path) -> None:
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if name in self.server.adapters:
            message = f"The lora adapter '{name}' has already been loaded."
            self._send(400, dict(error=dict(message=message)))
        elif rank > self.server.max_lora_rank:
            message = f"LoRA rank {rank} is greater than max_lora_rank {self.server.max_lora_rank}."
            self._send(500, dict(error=dict(message=message)))
        else:
            self.server.adapters[name] = path
            self._send(200, f"Success: LoRA adapter '{name}' added successfully.")

    def _unload(self, name: str) -> None:
        if self.server.adapters.pop(name, None) is None:
            message = f"The lora adapter '{name}' cannot be found."
            self._send(404, dict(error=dict(message=message)))
        else:
            self._send(200, f"Success: LoRA adapter '{name}' removed successfully.")

    def _send(self, status: int, content: Any) -> None:
        is_text = isinstance(content, str)
        data = content.encode() if is_text else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.server.byte_seconds:
            self.wfile.write(data)
            return
        for byte in data:
            self.wfile.write(bytes([byte]))
            time.sleep(self.server.byte_seconds)

    def log_message(self, *args: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--delay_seconds", type=float, default=0.0, help="of each completion")
    flags = parser.parse_args()
    server = StandIn(flags.port)
    server.delay_seconds = flags.delay_seconds
    server.serve_forever()


if __name__ == "__main__":
    main()
