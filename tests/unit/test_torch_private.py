"""The one file with private names of torch: nothing else uses any, and each works with the torch at hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import get_worker_info

import hetexp
from hetexp import torch_private
from hetexp.model.base import type_in

PACKAGE = Path(hetexp.__file__).parent
FILES = sorted([*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "hydra_plugins").rglob("*.py")])
OTHERS = {
    "_get_node", "_is_missing", "_is_interpolation", "_is_none",  # OmegaConf
    "_option_string_actions",  # argparse
    "_formatting",  # Hugging Face datasets
    "_exit", "_run_exitfuncs", "_forkserver", "_forkserver_alive_fd", "_forkserver_pid",  # Python
    "_singleton", "_connection", "_proc",  # wandb
    "_return_value", "_get_header_dict",  # Hydra
}  # fmt: skip
"""Private names of other libraries, which are not this test's subject."""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _own_names(trees: list[ast.Module]) -> set[str]:
    """Return every name that the package itself gives to a function, class, variable or attribute."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            names |= {node.attr} if isinstance(node.ctx, ast.Store) else set()
    return names


def _foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each private name that is none of the package's own."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt)):
        used: list[str] = []
        if isinstance(node, ast.Attribute):
            used = [node.attr]
        elif isinstance(node, ast.Import):
            used = [part for alias in node.names for part in alias.name.split(".") if part != "_"]
            used = used if any(alias.name.startswith("torch") for alias in node.names) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            used = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            used = [name.value] if isinstance(name, ast.Constant) and isinstance(name.value, str) else []
        for name_used in used:
            if _private(name_used) and name_used not in own and name_used not in OTHERS:
                yield node.lineno, name_used


def test_no_other_file_uses_a_private_name_of_torch() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
    home = PACKAGE / "torch_private.py"
    own = _own_names([tree for path, tree in trees.items() if path != home])
    elsewhere = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {name}"
        for path, tree in trees.items()
        if path != home
        for line, name in _foreign(tree, own)
    ]
    assert elsewhere == []
    assert list(_foreign(trees[home], own)), "the search itself finds private names"


def test_a_callback_runs_at_the_end_of_backward() -> None:
    order = []
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(lambda _: torch_private.queue_after_backward(lambda: order.append("end")))
    weight.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    loss.backward()
    assert order == ["gradient", "end"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_have_the_key_of_their_storage(device: str) -> None:
    tensor, other = torch.zeros(4, device=device), torch.zeros(4, device=device)
    assert torch_private.storage_key(tensor) == torch_private.storage_key(tensor[1:])
    assert torch_private.storage_key(tensor) != torch_private.storage_key(other)


def test_parts_of_a_sparse_tensor_are_not_summed() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (3,))
    indices, values = torch_private.sparse_parts(tensor)
    assert indices.tolist() == [[1, 1]]
    assert values.tolist() == [2.0, 3.0]


@pytest.mark.parametrize("fused", [True, False])
def test_tensors_are_scaled_in_place(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not fused:
        monkeypatch.delattr(torch, "_foreach_mul_")
    tensors = [torch.ones(2), torch.full((3,), 2.0)]
    torch_private.scale_all_(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [1.0, 1.0, 1.0]]


def test_a_module_is_asked_and_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert isinstance(model[1], torch_private.BatchNormBase)
    torch_private.apply_to_tensors(model, lambda tensor: tensor.to(type_in(tensor, torch.float64)))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert torch_private.to_arguments("cpu", torch.float16, non_blocking=True) == (
        torch.device("cpu"),
        torch.float16,
        True,
    )
    assert torch_private.uncompiled(torch.compile(model, backend="eager")) is model  # type: ignore[arg-type]
    assert torch_private.uncompiled(model) is model
    hook = lambda module, inputs: None  # noqa: E731
    model.register_forward_pre_hook(hook)
    assert torch_private.forward_pre_hooks(model) == [hook]


def test_spectral_norms_have_their_class() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
    assert isinstance(layer.parametrizations["weight"][0], torch_private.spectral_norm_class())  # type: ignore[index]


def test_a_stage_has_no_message_for_its_neighbours_before_the_first_step() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        stage = PipelineStage(nn.Linear(2, 2), 0, 1, torch.device("cpu"), input_args=torch.ones(1, 2))
        torch_private.leave_out_first_messages(stage)
        assert getattr(stage, "_get_init_p2p_neighbors_ops", list)() == []
    finally:
        dist.destroy_process_group()


def test_the_compiler_is_asked() -> None:
    torch_private.import_compiler()
    torch_private.allow_any_size(torch.zeros(2, 3), 0)
    (error,) = torch_private.compiler_errors()
    assert issubclass(error, Exception)


def test_a_loader_process_is_hidden() -> None:
    torch_private.hide_loader_process()
    assert get_worker_info() is None


def test_groups_form_again_in_the_same_process() -> None:
    store = dist.HashStore()
    for number in range(2):
        torch_private.restart_group_count()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(str(number), store), rank=0, world_size=1,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        try:
            torch_private.set_default_timeout(timedelta(seconds=30))
            torch_private.default_store().set("key", "value")
            held = torch_private.formed_groups()
            assert held == [dist.group.WORLD]
            wrapped = nn.Linear(2, 2)
            torch_private.exclude_from_ddp(wrapped, ["bias"])
            module = DistributedDataParallel(wrapped)
            module(torch.ones(1, 2)).sum().backward()
            torch_private.remove_ddp_hooks(module)
        finally:
            (torch_private.abort_groups, dist.destroy_process_group)[number]()
    assert torch_private.formed_groups() == []


def test_a_default_group_is_forgotten() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    torch_private.forget_default_group()
    assert not dist.is_initialized()
    dist.distributed_c10d._update_default_pg(group)  # so that its threads end
    dist.destroy_process_group()


def test_a_group_of_a_library_forms_alone() -> None:
    gloo = torch_private.group_class("gloo")
    assert gloo is not None
    group = gloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
    torch_private.set_library_timeout(group, timedelta(seconds=30))
    tensor = torch.ones(2)
    gathered = [torch.zeros(2)]
    group.allgather([gathered], [tensor], torch_private.all_gather_options()).wait()
    assert gathered[0].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("asked", ["", "1"])
def test_torchs_variable_chooses_the_class_for_nccl(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names: Any = dist.distributed_c10d
    if not hasattr(names, "ProcessGroupNCCL"):
        monkeypatch.setattr(names, "ProcessGroupNCCL", object(), raising=False)
    monkeypatch.setattr(names, "ProcessGroupNCCL2", object(), raising=False)
    monkeypatch.setenv(torch_private.USE_NCCL2, asked)
    expected = names.ProcessGroupNCCL2 if asked else names.ProcessGroupNCCL
    assert torch_private.group_class("nccl") is expected
    monkeypatch.delattr(names, "ProcessGroupNCCL2")
    assert torch_private.group_class("nccl") is names.ProcessGroupNCCL


def test_options_of_nccl_have_what_torch_gives_them() -> None:
    nccl = torch_private.group_class("nccl")
    if nccl is None:
        pytest.skip("this torch has no NCCL")
    options = torch_private.group_options(nccl, timedelta(seconds=7), 2)
    assert options._timeout == timedelta(seconds=7)
    assert list(options.global_ranks_in_group) == [0, 1]
