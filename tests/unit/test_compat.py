"""Private names of other packages: each is as clipx/compat.py has read it."""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from submitit.slurm.slurm import SlurmExecutor

from clipx import compat

COVERED: set[str] = set()


def private(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator of a test of private names: a failure reports package, versions, use and replacement of each."""
    COVERED.update(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def reporting(**fixtures: Any) -> None:
            try:
                test(**fixtures)
            except Exception as error:
                pytest.fail("\n".join([repr(error), *(compat.PRIVATE[name].changed() for name in names)]))

        return reporting

    return decorate


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@private("foreach_add_", "foreach_copy_", "foreach_lerp_", "foreach_sub")
def test_lists_of_tensors_take_one_operation() -> None:
    import torch

    for name, others, wanted in (
        ("add_", (), [6, 7]), ("copy_", (), [5, 5]), ("lerp_", (0.5,), [3, 3.5]), ("sub", (), [-4, -3])
    ):  # fmt: skip
        own = [torch.ones(1), torch.full((1,), 2.0)]
        found = getattr(compat, f"foreach_{name}")(own, [torch.full((1,), 5.0)] * 2, *others)
        assert [x.item() for x in (own if name.endswith("_") else found)] == wanted, name


@private("attention_cudnn", "attention_efficient", "attention_flash", "attention_varlen", "int_mm", "scaled_mm")
def test_operators_have_overloads_whose_outputs_can_be_stored() -> None:
    for name in ("attention_cudnn", "attention_efficient", "attention_flash", "attention_varlen"):
        arguments = [argument.name for argument in compat.schema_of(getattr(compat, name).default).arguments]
        assert arguments[:3] == ["query", "key", "value"]
    for name in ("int_mm", "scaled_mm"):
        arguments = [argument.name for argument in compat.schema_of(getattr(compat, name).default).arguments]
        assert arguments[:2] == ["self", "mat2"]


@private("attention_cpu", "attention_cpu_backward")
def test_attention_on_the_cpu_has_a_gradient() -> None:
    import torch
    import torch.nn.functional as F

    q, k, v, grad = (torch.randn(1, 2, 3, 4) for _ in range(4))
    q.requires_grad_()
    out, lse = compat.attention_cpu(q, k, v, 0.0, True)
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, wanted)
    found = compat.attention_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
    torch.testing.assert_close(found[0], torch.autograd.grad(wanted, q, grad)[0])


@private("resize_bicubic", "resize_bilinear")
def test_an_image_is_resized_into_given_memory() -> None:
    import torch
    import torch.nn.functional as F

    image, out = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8), torch.empty(1, 3, 4, 4, dtype=torch.uint8)
    for mode in ("bicubic", "bilinear"):
        getattr(compat, f"resize_{mode}").out(image, [4, 4], False, out=out)
        assert torch.equal(out, F.interpolate(image, size=4, mode=mode, antialias=True))


@private("FakeTensor", "FakeTensorMode")
def test_tensors_may_be_without_memory() -> None:
    import torch

    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(torch.ones(2), compat.FakeTensor)


@private("TorchDispatchMode", "schema_of")
def test_a_mode_sees_operators_with_their_names_and_arguments() -> None:
    import torch

    seen = []

    class Names(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func.name(), [argument.name for argument in compat.schema_of(func).arguments]))
            return func(*args, **(kwargs or {}))

    with Names():
        torch.ones(2).neg_()
    assert seen[-1] == ("aten::neg_", ["self"])


@private("pytree")
def test_leaves_of_nested_values_are_found() -> None:
    assert compat.pytree.tree_leaves(([1], {"a": 2})) == [1, 2]
    has_logger = compat.pytree.__name__ in logging.root.manager.loggerDict
    assert has_logger is not version("torch").startswith("2.11.")


@private("new_shared", "open_shared", "share_fd")
def test_memory_is_shared_by_a_file_that_can_be_opened_again() -> None:
    import torch

    storage = compat.new_shared(8)
    file, size = compat.share_fd(storage)
    opened = os.dup(file)
    again = compat.open_shared(opened, size)
    os.close(opened)
    storage[0] = 7
    assert (size, again[0]) == (8, 7) and isinstance(again, torch.UntypedStorage)


@private("loader_workers")
def test_an_iterator_of_a_loader_has_its_processes() -> None:
    from torch.utils.data import DataLoader

    items = iter(DataLoader(range(2), num_workers=1))
    assert [worker.exitcode for worker in compat.loader_workers(items)] == [None]
    assert compat.loader_workers(iter(DataLoader(range(2))), ()) == ()


@private("default_store")
def test_a_process_group_has_a_default_store() -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    assert not parameters(compat.default_store)
    assert compat.default_store.__annotations__["return"] is dist.Store


@private("dynamo_config", "dynamo_counters")
def test_compilation_has_counters_and_limits() -> None:
    assert isinstance(compat.dynamo_counters["unimplemented"], dict) and compat.is_loaded("dynamo_counters")
    assert isinstance(compat.dynamo_config.optimize_ddp, bool | str)
    assert isinstance(compat.dynamo_config.recompile_limit, int)


@private("supports_amp_scaling")
def test_a_fused_optimizer_supports_loss_scaling() -> None:
    import torch

    weight = [torch.nn.Parameter(torch.ones(1))]
    assert compat.supports_amp_scaling(torch.optim.AdamW(weight, fused=True), False) is True
    assert not compat.supports_amp_scaling(torch.optim.AdamW(weight), False)


@private("timm_builder")
def test_timm_loads_weights_by_one_function() -> None:
    """timm loads weights by the name in this module: replaced there, nothing is fetched."""
    import timm

    from clipx.weights.timm_filter import recorded_loading

    assert "filter_fn" in parameters(compat.timm_builder.load_pretrained)
    with recorded_loading() as found:
        timm.create_model("vit_tiny_patch16_224", pretrained=True)
    assert found.function is not None and found.classifiers == ("head",)


@private("flags_of", "get_args_parser")
def test_the_flags_of_hydra_are_known() -> None:
    parser = compat.get_args_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    assert {"--config-dir", "--multirun", "-m", "--cfg"} <= {*compat.flags_of(parser)}
    assert compat.flags_of(parser)["--config-dir"].dest == "config_dir"


@private("apply_overrides", "overrides_dirname")
def test_overrides_are_applied_to_a_composed_configuration() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    cfg, parsed = OmegaConf.create({"a": 1, "b": 2}), OverridesParser.create().parse_overrides(["a=3", "b=4"])
    compat.apply_overrides(parsed, cfg)
    assert cfg == {"a": 3, "b": 4}
    assert compat.overrides_dirname(parsed, exclude_keys=["b"], item_sep=",", kv_sep=":") == "a:3"


@private("config_repository")
def test_a_loader_knows_its_groups_and_those_of_the_search_path(tmp_path: Path) -> None:
    from hydra.core.global_hydra import GlobalHydra

    from clipx.config.compose import isolated_hydra

    (tmp_path / "own").mkdir()
    with isolated_hydra():
        loader = GlobalHydra.instance().config_loader()
    _, repository = compat.config_repository(loader, "train", [f"hydra.searchpath=[{tmp_path}]"])
    assert [repository.group_exists(key) for key in ("objective", "own", "seed")] == [True, True, False]


@private("FileConfigSource", "StructuredConfigSource", "SourcesRegistry")
def test_the_source_of_yaml_files_can_be_replaced() -> None:
    from hydra.core.plugins import Plugins
    from hydra.plugins.config_source import ConfigSource

    Plugins.instance()
    assert issubclass(compat.FileConfigSource, ConfigSource) and compat.FileConfigSource.scheme() == "file"
    structured = compat.StructuredConfigSource
    assert issubclass(structured, ConfigSource) and structured.scheme() == "structured"
    registered = compat.SourcesRegistry.instance().types["file"]  # maybe of another import: Hydra reloads its plug-ins
    assert issubclass(registered, ConfigSource) and "load_config" in vars(registered)


@private("full_key_of")
def test_a_resolver_knows_the_key_of_its_value() -> None:
    OmegaConf.register_new_resolver("key_of_compat", lambda _node_: compat.full_key_of(_node_)(None))
    try:
        assert OmegaConf.create({"a": {"b": "${key_of_compat:}"}}).a.b == "a.b"
    finally:
        OmegaConf.clear_resolver("key_of_compat")


@private("root_of")
def test_a_node_knows_the_whole_configuration() -> None:
    cfg = OmegaConf.create({"a": {"b": 1}})
    assert compat.root_of(cfg.a) is cfg


@private("submission_text", "submit_command")
def test_submitit_submits_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parameters(compat.submit_command) == ["self", "command"]
    assert parameters(compat.submission_text) == ["self", "command", "uid"]
    (sbatch := tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 7 >&1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "srun").symlink_to(sbatch)  # without one, submitit refuses
    executor = SlurmExecutor(tmp_path)
    executor.update_parameters(time=5, use_srun=False)
    text = compat.submission_text(executor, "hostname", "")
    assert "\n#SBATCH --time=5\n" in text and "\nhostname\n" in text
    job = compat.submit_command(executor, "hostname")
    assert (job.job_id, job.paths.submission_file.read_text()) == ("7", text)


@private("trial_id")
def test_an_unfinished_trial_can_be_continued() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    study.ask()
    trial = optuna.trial.Trial(study, compat.trial_id(study.trials[0]))
    assert trial.number == 0


@private("processes_of_pool")
def test_a_pool_has_its_processes_by_pid() -> None:
    with concurrent.futures.ProcessPoolExecutor(1) as pool:
        processes = compat.processes_of_pool(pool)
        assert pool.submit(os.getpid).result() in processes


@private("set_allocator_settings")
def test_settings_of_the_allocator_are_checked() -> None:
    compat.set_allocator_settings("expandable_segments:False")  # the default
    with pytest.raises(ValueError, match="no_such_setting"):
        compat.set_allocator_settings("no_such_setting:1")


@private("inductor_config")
def test_inductor_has_a_deterministic_mode() -> None:
    assert compat.inductor_config.deterministic is False


def test_each_private_name_has_a_test() -> None:
    assert compat.PRIVATE.keys() == COVERED


def test_a_name_that_is_gone_is_reported_with_its_use_and_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = compat.Private("torch 2.11.0", "torch:UntypedStorage._gone", "shares memory", "share_memory_()")
    monkeypatch.setitem(compat.PRIVATE, "gone", gone)
    with pytest.raises(ImportError) as raised:
        from clipx.compat import gone as _  # type: ignore[attr-defined]  # noqa: F401
    assert str(raised.value) == (
        f"torch:UntypedStorage._gone of torch {version('torch')} is not as in torch 2.11.0, where clipx/compat.py has "
        "read it. Use: shares memory. Replacement: share_memory_()."
    )
    with pytest.raises(AttributeError, match=r"module clipx.compat has no attribute other"):
        compat.other  # noqa: B018


def test_the_module_imports_no_package() -> None:
    code = "import sys; from clipx.compat import is_loaded; print(is_loaded('dynamo_counters'), *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, *modules = done.stdout.split()
    assert loaded == "False"
    assert not {"torch", "timm", "hydra", "omegaconf", "submitit"} & {*modules}
