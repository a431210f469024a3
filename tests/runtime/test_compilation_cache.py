import os
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxlc.config import MeshConfig, RuntimeConfig
from jaxlc.core.errors import UserError
from jaxlc.runtime import compilation_cache
from jaxlc.simulate.topology import WITHOUT_GPU, has_gpu_compiler, make_mesh, topology
from tests.helpers import without_home


@pytest.fixture
def cache_dir(tmp_path):
    """An empty cache directory that JAX uses instead of the usual one."""
    usual = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", usual)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def compile_for(devices) -> None:
    sharding = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    options = dict(WITHOUT_GPU) if devices[0].platform == "gpu" else None
    with compilation_cache.for_step(devices):
        jax.jit(lambda x: x @ x + 1).lower(x).compile(compiler_options=options)


def test_for_step_with_present_devices_uses_the_cache(cache_dir):
    compile_for(jax.devices())
    assert any(cache_dir.iterdir())
    assert jax.config.jax_enable_compilation_cache


def test_disabled_writes_no_entry_and_restores_the_cache(cache_dir):
    with compilation_cache.disabled():
        compile_for(jax.devices())
    assert not any(cache_dir.iterdir())
    compile_for(jax.devices())
    assert any(cache_dir.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.5], ids=["empty", "half"])
def test_for_step_with_torn_entry_compiles_and_replaces_it(cache_dir, share):
    """As of a process that was killed while it wrote the entry. The next start finds a complete
    one.
    """
    compile_for(jax.devices())
    [entry] = cache_dir.glob("*-cache")
    complete = entry.read_bytes()
    entry.write_bytes(complete[: int(share * len(complete))])
    jax.clear_caches()
    with pytest.warns(UserWarning, match="compiled again, 1 damaged entries deleted"):
        compile_for(jax.devices())
    jax.clear_caches()
    compile_for(jax.devices())
    jax.clear_caches()
    with compilation_cache.watch() as came_from_cache:
        compile_for(jax.devices())
    assert came_from_cache()


@pytest.mark.skipif(not has_gpu_compiler(), reason="needs the GPU compiler")
def test_for_step_with_absent_devices_compiles_without_warning(cache_dir):
    mesh = make_mesh(topology("h100:1x1"), MeshConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            jax.clear_caches()
            compile_for(list(mesh.devices.flat))
    assert not any(cache_dir.iterdir())


@pytest.fixture
def unset(cache_dir, monkeypatch, tmp_path):
    """No directory given by the user, and an empty directory for the default; returns it."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(compilation_cache._Directories, "jax", None)
    monkeypatch.setattr(compilation_cache._Directories, "step", None)
    jax.config.update("jax_compilation_cache_dir", None)
    return tmp_path / "caches" / "jaxlc" / "xla"


def configured(directory: str = "auto", platform: str = "gpu", **runtime) -> str | None:
    compilation_cache.configure(RuntimeConfig(compilation_cache_dir=directory, **runtime), platform)
    return jax.config.jax_compilation_cache_dir


def test_configure_auto_uses_and_creates_the_default_directory(unset):
    assert configured() == str(unset)
    assert unset.is_dir()


def test_configure_auto_keeps_the_directory_of_the_user(unset, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "environment"))
    assert configured() == str(tmp_path / "environment")
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "python"))
    assert configured() == str(tmp_path / "python")
    assert not unset.exists()


def test_configure_again_follows_the_config(unset, tmp_path):
    assert configured(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert configured("") is None
    assert configured() == str(unset)


def test_configure_several_processes_need_a_named_directory(unset, tmp_path):
    assert configured(num_processes=2) is None
    assert configured(str(tmp_path / "shared"), num_processes=2) == str(tmp_path / "shared")


def test_configure_directory_that_cannot_be_created(unset, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="config.runtime.compilation_cache_dir: Not a directory"):
        configured(str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert configured() is None
    assert "compiled programs are not cached" in capsys.readouterr().out
    monkeypatch.delenv("XDG_CACHE_HOME")
    without_home(monkeypatch)
    assert configured() is None
    assert "not cached: ~/.cache/jaxlc/xla" in capsys.readouterr().out


def test_configure_on_cpu_before_xla_0_12_is_for_the_step_only(unset, monkeypatch, capfd):
    monkeypatch.setattr(compilation_cache, "xla_version", lambda: (0, 10, 1))
    assert configured(platform="cpu") is None
    with compilation_cache.for_step(jax.devices()):
        assert jax.config.jax_compilation_cache_dir == str(unset)
        os.write(2, b"cpu_aot_loader.cc: +prefer-no-gather\nanother line\n")
    assert jax.config.jax_compilation_cache_dir is None
    assert capfd.readouterr().err == "another line\n"
    monkeypatch.setattr(compilation_cache, "xla_version", lambda: (0, 12, 0))
    assert configured(platform="cpu") == str(unset)


@pytest.mark.jax_version
def test_cache_covers_autotuning():
    """JAX then gives XLA a directory for the autotuning of single fusions, in the directory of the
    cache.
    """
    assert (
        "xla_gpu_per_fusion_autotune_cache_dir" in jax.config.jax_persistent_cache_enable_xla_caches
    )


def test_watch_tells_hits_from_misses(cache_dir):
    with compilation_cache.watch() as all_from_cache:
        assert not all_from_cache()
        compile_for(jax.devices())
        assert not all_from_cache()
    jax.clear_caches()
    with compilation_cache.watch() as all_from_cache:
        compile_for(jax.devices())
        assert all_from_cache()


def write_entry(path: Path, *, size: int, days: int) -> None:
    path.write_bytes(bytes(size))
    os.utime(path, (days * 86400, days * 86400))


def test_prune_deletes_the_least_recently_used_entries_only(tmp_path):
    for days, name in enumerate(["old-cache", "read-cache", "new-cache", "notes.txt"]):
        write_entry(tmp_path / name, size=100, days=days)
    write_entry(tmp_path / "notes.txt", size=100, days=0)
    os.utime(tmp_path / "read-cache", (9 * 86400, 86400))
    compilation_cache.prune(tmp_path, 300)
    assert len(list(tmp_path.iterdir())) == 4
    compilation_cache.prune(tmp_path, 199)
    assert {path.name for path in tmp_path.iterdir()} == {"read-cache", "notes.txt"}
