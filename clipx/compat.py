"""Private names of other packages. No other file of clipx uses one.

    from clipx.compat import FakeTensorMode

Each entry of PRIVATE has the package and version in which the name was read, its place, its use, and what can replace
it when a release removes it. A name is looked up when it is imported from here; this module itself imports no package.
tests/unit/test_compat.py checks what clipx expects of each.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for base classes and annotations; all other names are Any
    from hydra._internal.core_plugins.file_config_source import FileConfigSource as FileConfigSource
    from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource as StructuredConfigSource
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of another package."""

    read: str
    """Package and version in which it was read."""

    place: str
    """`MODULE`, or `MODULE:NAME`. `.NAME`: an attribute of objects, as a function of the object and of a default."""

    use: str
    """Purpose in clipx."""

    replacement: str
    """Alternative for a release without the name."""

    def get(self) -> Any:
        """Imports the module and returns the object. Raises ImportError if it does not exist."""
        module, _, name = self.place.partition(":")
        if module.startswith("."):
            return lambda owner, *default: getattr(owner, module[1:], *default)
        try:
            found = importlib.import_module(module)
            return attrgetter(name)(found) if name else found
        except (ImportError, AttributeError) as error:
            raise ImportError(self.changed()) from error

    def changed(self) -> str:
        """Returns the error for a name that is gone or has changed: package, both versions, name, use, replacement."""
        from importlib.metadata import version

        package = self.read.partition(" ")[0]
        now = sys.version.split()[0] if package == "python" else version(package)
        return (
            f"{self.place} of {package} {now} is not as in {self.read}, where clipx/compat.py has read it. "
            f"Use: {self.use}. Replacement: {self.replacement}."
        )


_TORCH = "torch 2.15.0"
_ONE_KERNEL = "one kernel for all tensors of a list"
_A_LOOP = "a loop over the tensors"
_COMPILED = "options and counters of torch.compile"
_STORED = "selective checkpointing stores the outputs of this operator"
_FAKE = "tensors without memory, for the dry run of clipx.plan"
_SHARED = "rows of samples in shared memory that loader processes use again"
_COMPOSED = "points of a sweep that share a composition (clipx/config/composer.py)"

PRIVATE = {
    # torch: lists of tensors
    "foreach_add_": Private(_TORCH, "torch:_foreach_add_", _ONE_KERNEL, _A_LOOP),
    "foreach_copy_": Private(_TORCH, "torch:_foreach_copy_", _ONE_KERNEL, _A_LOOP),
    "foreach_lerp_": Private(_TORCH, "torch:_foreach_lerp_", _ONE_KERNEL, _A_LOOP),
    "foreach_sub": Private(_TORCH, "torch:_foreach_sub", _ONE_KERNEL, _A_LOOP),
    # torch: operators
    "attention_cpu": Private(
        _TORCH,
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "attention of packed texts on the CPU, with the log-sum-exp that its backward pass takes",
        "F.scaled_dot_product_attention in a function that computes its gradient by autograd",
    ),
    "attention_cpu_backward": Private(
        _TORCH,
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "backward pass of attention_cpu",
        "as of attention_cpu",
    ),
    "attention_cudnn": Private(_TORCH, "torch:ops.aten._scaled_dot_product_cudnn_attention", _STORED, "leave it out"),
    "attention_efficient": Private(
        _TORCH, "torch:ops.aten._scaled_dot_product_efficient_attention", _STORED, "leave it out"
    ),
    "attention_flash": Private(_TORCH, "torch:ops.aten._scaled_dot_product_flash_attention", _STORED, "leave it out"),
    "attention_varlen": Private(
        _TORCH, "torch.nn.attention.varlen:torch.ops.torch_attn._varlen_attn", _STORED, "leave it out"
    ),
    "int_mm": Private(_TORCH, "torch:ops.aten._int_mm", _STORED, "leave it out"),
    "scaled_mm": Private(_TORCH, "torch:ops.aten._scaled_mm", _STORED, "leave it out"),
    "resize_bicubic": Private(
        _TORCH,
        "torch:ops.aten._upsample_bicubic2d_aa",
        "resizes an image into the memory of its row",
        "F.interpolate(mode='bicubic', antialias=True), which has no out=, and a copy",
    ),
    "resize_bilinear": Private(
        _TORCH, "torch:ops.aten._upsample_bilinear2d_aa", "as resize_bicubic", "as of resize_bicubic"
    ),
    # torch: tensors without memory, and what sees every operator
    "FakeTensor": Private(_TORCH, "torch._subclasses.fake_tensor:FakeTensor", _FAKE, "tensors on the meta device"),
    "FakeTensorMode": Private(
        _TORCH, "torch._subclasses.fake_tensor:FakeTensorMode", _FAKE, "tensors on the meta device, without autocast"
    ),
    "TorchDispatchMode": Private(
        _TORCH,
        "torch.utils._python_dispatch:TorchDispatchMode",
        "counts live bytes (clipx.plan) and collectives (clipx.bench) by operator",
        "torch.profiler",
    ),
    "schema_of": Private(
        _TORCH, "._schema", "name and arguments of an operator of c10d, by which clipx.bench counts bytes", "its str()"
    ),
    "pytree": Private(
        _TORCH, "torch.utils._pytree", "tensors in the arguments of an operator; name of its logger", "optree"
    ),
    # torch: processes
    "share_fd": Private(
        _TORCH,
        "torch:UntypedStorage._share_fd_cpu_",
        f"{_SHARED}: the descriptor of their file",
        "Tensor.share_memory_() of new rows: by_file=False in clipx/data/shared_memory.py",
    ),
    "new_shared": Private(
        _TORCH, "torch:UntypedStorage._new_shared", f"{_SHARED}: a new file", "torch.empty(size).share_memory_()"
    ),
    "open_shared": Private(
        _TORCH,
        "torch:UntypedStorage._new_shared_fd_cpu",
        f"{_SHARED}: a tensor in a file that exists",
        "new memory for all rows: _KEPT = 0 in clipx/data/shared_memory.py",
    ),
    "loader_workers": Private(
        _TORCH,
        "._workers",
        "processes of a DataLoader's iterator, whose death is reported with its cause",
        "multiprocessing.active_children()",
    ),
    "default_store": Private(
        _TORCH,
        "torch.distributed.distributed_c10d:_get_default_store",
        "store for heartbeats in a process group that somebody else has initialized",
        "dist.group.WORLD.get_group_store(), if the lowest torch that clipx supports has it",
    ),
    # torch: settings
    "set_allocator_settings": Private(
        _TORCH,
        "torch:_C._accelerator_setAllocatorSettings",
        "expandable segments, and fewer of them on a device without virtual memory",
        "PYTORCH_ALLOC_CONF in the environment before torch is imported",
    ),
    "dynamo_config": Private(_TORCH, "torch._dynamo.config", _COMPILED, "torch.compiler.config"),
    "dynamo_counters": Private(_TORCH, "torch._dynamo.utils:counters", _COMPILED, "the warning that TORCH_LOGS shows"),
    "inductor_config": Private(_TORCH, "torch._inductor.config", _COMPILED, "torch.compile(options={…})"),
    "supports_amp_scaling": Private(
        _TORCH,
        "._step_supports_amp_scaling",
        "whether an optimizer reads grad_scale and found_inf, by GradScaler's protocol",
        "the option fused of its parameter groups",
    ),
    # timm
    "timm_builder": Private(
        "timm 1.0.31",
        "timm.models._builder",
        "its load_pretrained is replaced, to record the conversion of an architecture's weights",
        "checkpoint_filter_fn of the architecture's module",
    ),
    # Hydra and OmegaConf
    "get_args_parser": Private(
        "hydra-core 1.3.8",
        "hydra._internal.utils:get_args_parser",
        "parser of Hydra's flags, with which clipx.cli checks the command line first",
        "a parser with the flags of `python -m clipx.train --hydra-help`",
    ),
    "apply_overrides": Private(
        "hydra-core 1.3.8",
        "hydra._internal.config_loader_impl:ConfigLoaderImpl._apply_overrides_to_config",
        _COMPOSED,
        "hydra.compose for each point, 0.2 s each",
    ),
    "config_repository": Private(
        "hydra-core 1.3.8",
        "hydra._internal.config_loader_impl:ConfigLoaderImpl._parse_overrides_and_create_caching_repo",
        f"{_COMPOSED}: groups, those of hydra.searchpath included",
        "ConfigLoader.get_group_options, 0.2 s for each key",
    ),
    "overrides_dirname": Private(
        "hydra-core 1.3.8",
        "hydra._internal.config_loader_impl:get_overrides_dirname",
        _COMPOSED,
        "hydra.compose for each point, 0.2 s each",
    ),
    "FileConfigSource": Private(
        "hydra-core 1.3.8",
        "hydra._internal.core_plugins.file_config_source:FileConfigSource",
        "base class of the source of YAML files with limits of size and depth",
        "a copy of it on hydra.plugins.config_source.ConfigSource",
    ),
    "StructuredConfigSource": Private(
        "hydra-core 1.3.8",
        "hydra._internal.core_plugins.structured_config_source:StructuredConfigSource",
        "base class of the source of schemas that imports the module of an option when it is looked up",
        "a copy of it on hydra.plugins.config_source.ConfigSource",
    ),
    "SourcesRegistry": Private(
        "hydra-core 1.3.8",
        "hydra._internal.sources_registry:SourcesRegistry",
        "replaces Hydra's sources of YAML files and of schemas by those of clipx",
        "a scheme of its own, by a SearchPathPlugin",
    ),
    "full_key_of": Private(
        "omegaconf 2.3.1",
        "._get_full_key",
        "key of the value that a resolver computes, for its error",
        "an error without the key, and a rule for `name` in RunSpec",
    ),
    "root_of": Private(
        "omegaconf 2.3.1",
        "omegaconf:Node._get_root",
        "configuration of an unknown key, in which a similar key is searched",
        "an error that names no key of another group",
    ),
    # submitit and Optuna
    "submit_command": Private(
        "submitit 1.5.4",
        "submitit.slurm.slurm:SlurmExecutor._submit_command",
        "submits a script: the public submit pickles a Python function, whose error leaves its job COMPLETED",
        "sbatch by clipx_launch.cluster.run_slurm",
    ),
    "submission_text": Private(
        "submitit 1.5.4",
        "submitit.slurm.slurm:SlurmExecutor._make_submission_file_text",
        "text of a script, to print it or to test it by sbatch --test-only",
        "#SBATCH lines of the parameters of SlurmExecutor.update_parameters",
    ),
    "trial_id": Private(
        "optuna 5.0.0",
        "._trial_id",
        "continues an unfinished trial of an earlier start",
        "Study.enqueue_trial with its parameters",
    ),
    # Python
    "processes_of_pool": Private(
        "python 3.11", "._processes", "processes of a ProcessPoolExecutor: which of them died first", "an error without"
    ),
    "flags_of": Private(
        "python 3.11", "._option_string_actions", "flags of an ArgumentParser, for a similar one", "its format_help()"
    ),
}
"""Private names by the name under which this module has them."""


def __getattr__(name: str) -> Any:
    if name not in PRIVATE:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return PRIVATE[name].get()


def is_loaded(name: str) -> bool:
    """Returns whether this process has imported the module of a name."""
    return PRIVATE[name].place.partition(":")[0] in sys.modules
