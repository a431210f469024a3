"""Rollouts by a server, in the background of training. The policy after each step is an adapter in a
directory that the server sees, too.

Step s is trained on answers of version max(0, s - 1 - rollouts.lag). A version, the number of the
step that made it, is written once. After a restart the same requests are made again, of the same
versions with the same seeds, and files of rollouts that exist are used.
"""

import asyncio
import hashlib
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.config import Config
from jaxlc.config.models.config_json import family_of
from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, local_path, write_errors_explained
from jaxlc.data.tokens.encoder import stops_of
from jaxlc.generation.policy_rollouts import HELDOUT, means_of, prompts_of_step
from jaxlc.hf.adapters import WEIGHTS_FILE, Params, write_adapters
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder, lora
from jaxlc.posttrain.agents import check_failures, make_agents, seed_of
from jaxlc.posttrain.rollouts import Rollouts, on_process_0, write_rollouts
from jaxlc.posttrain.server import Server, open_teacher
from jaxlc.step.step import TrainStep

ADAPTERS = "adapters"  # the directory in the workdir


class ServerRollouts:
    """Makes the rollouts of steps on a server; process 0 does."""

    def __init__(self, step: TrainStep, source: Rollouts):
        """
        Raises:
          UserError: the agent or the reward cannot be loaded.
        """
        self._config, self._source = step.config, source
        self._prompts = (*source.prompts, *source.eval_prompts)
        setting = step.config.rollouts.server_directory
        directory = local_path(setting) if setting else source.workdir / ADAPTERS
        self._directory = directory.absolute()
        teacher = open_teacher(step.config, source.tokenizer, source.prompts[0].text)
        self._agents = make_agents(step.config, source.tokenizer, self._prompts, teacher)
        self._checkpoints = source.workdir / CHECKPOINTS_DIRECTORY
        self._original = original_of(step.config.model.init_from, source.workdir)
        stops = stops_of(step.config, source.tokenizer, self._original)
        url = step.config.rollouts.server
        self._server = Server(url=url, config=step.config, stops=stops)
        self._asked: set[int] = set()  # steps
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    @property
    def lines(self) -> list[str]:
        """For the start report, after the server was probed.

        Raises:
          UserError: the server cannot be reached, or must be started in another way.
        """
        probe = self._source.tokenizer, self._prompts[0].text
        on_process_0(lambda: self._submit(self._server.check(*probe)).result())
        place = displayed(self._directory)
        return [f"rollouts   by the server {self._config.rollouts.server}; adapters in {place}"]

    def __call__(self, params: dict, step: int, path: Path) -> None:
        """Publishes the parameters before `step`, and asks for the rollouts of the steps that can be
        made; every process calls it.
        """
        self._publish(params, step - 1)
        if jax.process_index() != 0:
            return
        rollouts = self._config.rollouts
        # no request refers to versions before that of this step
        self._ask(self._server.unload(self._directory, step - 1 - rollouts.lag))
        for later in range(step, min(step + rollouts.lag, self._config.train.steps) + 1):
            if later not in self._asked and not self._source.train.path(later).is_file():
                self._asked.add(later)
                self._ask(self._write(later))

    def heldout(self, params: dict, step: int, path: Path) -> dict[str, float]:
        """Means over the answers to rollouts.eval_prompts, as `PolicyRollouts.heldout`."""
        self._publish(params, step)
        numbers = range(len(self._source.prompts), len(self._prompts))
        asked = numbers, step, step, HELDOUT
        records = on_process_0(lambda: self._submit(self._answers(*asked)).result())
        return means_of(records or [], path)

    async def _write(self, step: int) -> None:
        config, path = self._config, self._source.train.path(step)
        numbers = prompts_of_step(config, len(self._source.prompts), step)
        version = max(0, step - 1 - config.rollouts.lag)
        records = await self._answers(numbers, step, version, 0)
        check_failures(records, config, path)
        write_rollouts(records, path)

    async def _answers(
        self, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> list[dict]:
        adapter = self._directory / str(version)
        if not adapter.is_dir():
            raise UserError(
                f"the rollouts of step {step} need the adapter {displayed(adapter)}, which does not exist: put it back,"
                " or use a different workdir"
            )
        # a server keeps the keys and values of a name that is loaded again: equal names have equal weights
        digest = hashlib.sha256((adapter / WEIGHTS_FILE).read_bytes()).hexdigest()[:12]
        name = f"{version}-{digest}"
        await self._server.load(name, adapter)
        seed = seed_of(self._config, step, attempt)
        sample = self._server.sampler(name, adapter, seed)
        return await self._agents.rollouts(numbers, step, version, sample)

    def _submit(self, coroutine) -> Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _ask(self, coroutine) -> None:
        self._submit(coroutine).add_done_callback(self._ended)

    def _ended(self, future: Future) -> None:
        if (error := future.exception()) is not None:
            self._source.train.failure = error

    def _publish(self, params: dict, version: int) -> None:
        """Writes the adapter of a version, unless it exists, and removes those that no resumed run
        needs.
        """
        target = self._directory / str(version)
        if broadcast_one_to_all(np.int32(target.is_dir())):
            return
        gathered = _gathered(params, self._config)
        on_process_0(lambda: self._write_version(gathered, target))

    def _write_version(self, params: Params, target: Path) -> None:
        config, original = self._config, self._original
        family, prefix = family_of(original and original.config_json(), config.model), ""
        if original is not None and original.has_images:
            prefix = [*family.multimodal_prefixes][-1]
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with write_errors_explained(partial, "use another config.rollouts.server_directory"):
            partial.mkdir(parents=True)
            write_adapters(config, family, params, partial, prefix=prefix)
            partial.rename(target)
        version, saved = int(target.name), committed_steps(self._checkpoints)
        first = min([version, *saved] if saved else [0]) - config.rollouts.lag
        for other in self._directory.iterdir():
            if other.name.isdigit() and int(other.name) < first:
                shutil.rmtree(other)


def _gathered(params: dict, config: Config) -> Params:
    """The trained parameters of a training state; every process calls it."""
    model, dims = config.model, decoder.dims_of(config.model, config.lora)
    trained, _ = lora.split(params, lora.frozen_names(config, lora.names_of(dims)))
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size, config.lora)))
    arrays = {path: process_allgather(x, tiled=True) for path, x in paths_of(trained)}
    for path, x in arrays.items():  # without padding of the vocabulary
        arrays[path] = x[tuple(map(slice, abstract[path].shape))]
    return SimpleNamespace(abstract=abstract, read=lambda paths: {x: arrays[x] for x in paths})
