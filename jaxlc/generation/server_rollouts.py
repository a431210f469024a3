"""Rollouts by a server, in the background of training. The policy after each step is an adapter in a
directory that the server sees, too.

Step s is trained on answers of version max(0, s - 1 - rollouts.lag). A version, the number of the
step that made it, is written once. After a restart the same requests are made again, of the same
versions with the same seeds, and files of rollouts that exist are used.
"""

import asyncio
import functools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace

import jax
from jax.experimental.multihost_utils import process_allgather

from jaxlc.checkpoints.files import CHECKPOINTS_DIRECTORY, committed_steps
from jaxlc.config.models.config_json import family_of
from jaxlc.config.models.pretrained import original_of
from jaxlc.core.errors import UserError
from jaxlc.core.files import displayed, file_fingerprint, local_path, write_errors_explained
from jaxlc.generation.policy_rollouts import Records, RolloutMaker, prompts_of_step
from jaxlc.hf.adapters import WEIGHTS_FILE, Params, write_adapters
from jaxlc.hf.load import paths_of
from jaxlc.models import decoder, lora
from jaxlc.posttrain.agents import in_background, seed_of, write_rewarded
from jaxlc.posttrain.rollouts import Rollouts
from jaxlc.posttrain.server import Server
from jaxlc.runtime.watchdog import on_process_0
from jaxlc.step.step import TrainStep

ADAPTERS = "adapters"  # the directory in the workdir


class ServerRollouts(RolloutMaker):
    """Makes the rollouts of steps on a server; process 0 does."""

    def __init__(self, step: TrainStep, source: Rollouts):
        super().__init__(step, source)
        setting = step.config.rollouts.server_directory
        directory = local_path(setting) if setting else source.workdir / ADAPTERS
        self._directory = directory.absolute()
        self._server = Server(
            url=step.config.rollouts.server,
            config=step.config,
            tokenizer=source.tokenizer,
            stops=self._stops,
        )
        self._next_step = 0  # the first one that was not asked for

    @property
    def lines(self) -> list[str]:
        """For the start report, after the server was probed.

        Raises:
          UserError: the server cannot be reached, or must be started in another way.
        """
        text = self._prompts[0].text
        on_process_0(lambda: in_background(self._server.check(text)).result())
        place = displayed(self._directory)
        return [f"rollouts   by the server {self._config.rollouts.server}; adapters in {place}"]

    def __call__(self, params: dict, step: int, path: Path) -> None:
        """Publishes the parameters before `step`, and asks for the rollouts of the steps that can be
        made.
        """
        self._publish(params, step - 1)
        if jax.process_index() == 0:
            lag = self._config.rollouts.lag
            first = max(step, self._next_step)
            self._next_step = min(step + lag, self._config.train.steps) + 1
            # no request refers to versions before this step's
            in_background(self._make(range(first, self._next_step), step - 1 - lag))

    def _answers(
        self, params: dict, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        self._publish(params, version)
        records = []
        asked = (numbers, step, version, attempt)
        on_process_0(lambda: records.extend(in_background(self._records(*asked)).result()))
        return records

    async def _make(self, steps: Iterable[int], first_version: int) -> None:
        try:
            await self._server.unload(self._directory, first_version)
            await asyncio.gather(*map(self._write, steps))
        except Exception as error:
            self._source.train.failure = error

    async def _write(self, step: int) -> None:
        config = self._config
        path = self._source.train.path(step)
        if path.is_file():
            return
        numbers = prompts_of_step(config, len(self._source.prompts), step)
        version = max(0, step - 1 - config.rollouts.lag)
        write_rewarded(await self._records(numbers, step, version, 0), config, path)

    async def _records(
        self, numbers: Sequence[int], step: int, version: int, attempt: int
    ) -> Records:
        adapter = self._directory / str(version)
        if not adapter.is_dir():
            raise UserError(
                f"the rollouts of step {step} need the adapter {displayed(adapter)}, which does not exist: put it back,"
                " or use a different workdir"
            )
        # a server keeps the keys and values of a name that is loaded again: equal names have equal weights
        name = f"{version}-{file_fingerprint(adapter / WEIGHTS_FILE)}"
        seed = seed_of(self._config, step, attempt)
        await self._server.load(name, adapter)
        sample = functools.partial(self._server.sample, name, adapter, seed)
        return await self._agents.rollouts(numbers, step, version, sample)

    def _publish(self, params: dict, version: int) -> None:
        """Writes the adapter of a version, unless it exists, and removes those that no resumed run
        needs.
        """
        target = self._directory / str(version)
        if on_process_0(target.is_dir):
            return
        gathered = _gathered(params, self._step)
        on_process_0(lambda: self._write_version(gathered, target))

    def _write_version(self, params: Params, target: Path) -> None:
        config = self._config
        original = original_of(config.model.init_from, self._source.workdir)
        family = family_of(original and original.config_json(), config.model)
        has_images = original is not None and original.has_images
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with write_errors_explained(partial, "use another config.rollouts.server_directory"):
            partial.mkdir(parents=True)
            write_adapters(config, family, params, partial, has_images=has_images)
            partial.rename(target)
        saved = committed_steps(self._source.workdir / CHECKPOINTS_DIRECTORY)
        first = min([int(target.name), *saved] if saved else [0]) - config.rollouts.lag
        for other in self._directory.iterdir():
            if other.name.isdigit() and int(other.name) < first:
                shutil.rmtree(other)


def _gathered(params: dict, step: TrainStep) -> Params:
    """The trained parameters of a training state; every process calls it."""
    model = step.config.model
    trained, _ = lora.split(params, step.frozen)
    abstract = dict(paths_of(decoder.abstract_params(model, model.vocab_size, step.config.lora)))
    arrays = {}
    for path, x in paths_of(trained):
        without_padding = tuple(map(slice, abstract[path].shape))  # of the vocabulary
        arrays[path] = process_allgather(x, tiled=True)[without_padding]
    return SimpleNamespace(abstract=abstract, read=lambda paths: {x: arrays[x] for x in paths})
