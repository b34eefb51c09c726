"""Adds up the squares of gradients that are spread over ranks, so that each element counts once.

The *root* of a device mesh is the mesh that it was sliced or flattened from. A mesh that was made directly is its own
root. A placement *cuts* a tensor if each rank along that dimension of the mesh has another part of it.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from . import torch_private

SLOTS = 256  # at most so many ranks have a slot of their own for the parameter in which they found NaN or inf


class Shards(NamedTuple):
    """How ranks add up the squares of all elements of some tensors.

    Attributes:
        groups: The process groups through which the sum goes, one after the other. If ranks cannot add up, there are
            none.
        device: The device of the sum. It is a GPU if one of the tensors is on a GPU.
        weights: How often this rank counts the squares of each tensor. If two ranks have the same part, each counts one
            half.
        holders: The ranks that hold each tensor. A tensor of another rank may have the same name, but not the same
            holders.
        problem: The reason why the sum is not that of all gradients, or "" if it is.
        is_right_here: Whether the sum is right for these ranks. If there is a problem, it is only that other ranks may
            hold other parameters, as the stages of a pipeline do.
    """

    groups: list[ProcessGroup]
    device: torch.device
    weights: list[float]
    holders: list[tuple[int, ...]]
    problem: str = ""
    is_right_here: bool = False

    def check(self, caller: str, *, is_ok_alone: bool = False) -> None:
        """Raises RuntimeError if there is a problem. `is_ok_alone`: the sum may be that of a stage."""
        if self.problem and not (is_ok_alone and self.is_right_here):
            raise RuntimeError(f"{caller}: {self.problem}")

    def check_groups(self, caller: str) -> None:
        """Raises RuntimeError if ranks cannot add up, not even flags."""
        if not self.groups:
            self.check(caller)

    def add_up_(self, norm: Tensor, found_inf: Tensor, record: Tensor | None = None, ids: Tensor | None = None) -> None:
        """Replaces norm and flag of this rank by those of all ranks. Every rank has to call this.

        All ranks read one sum, so they get the same bits. Nothing waits for the device.

        Args:
            norm: The norm of this rank's tensors, with squares counted as `weights` says. 0-dim, fp32.
            found_inf: Not 0 if one of these tensors holds NaN or inf. 0-dim, fp32.
            record: None, or the `Record` of csrc/table.h of a pass that was counted. If a rank found NaN or inf in this
                pass, the records of all ranks will name the first parameter of the first such rank. If a rank does not
                have this parameter, its record keeps the parameter that the rank found itself. If the rank found none,
                the index is the number of parameters.
            ids: What `ids_of` returned for the parameters of the record. None without a record.
        """
        # Not as many slots as there are ranks in the groups, because ranks may know of different groups.
        slots = 0 if record is None else min(dist.get_world_size(), SLOTS)
        vector = torch.zeros(2 + slots, dtype=torch.float64, device=norm.device)
        vector[0], vector[1] = found_inf, norm.double().square()
        is_here = found_inf != 0
        if record is not None and ids is not None and len(ids) > 0:
            own = ids.index_select(0, record[3].clamp(0, len(ids) - 1).view(1))[0]
            vector[2 + dist.get_rank() % slots] = torch.where(is_here, own, 0)
        for group in self.groups:
            dist.all_reduce(vector, group=group)
        found_inf.copy_(vector[0])
        norm.copy_(vector[1].sqrt())
        if record is not None and ids is not None:
            first = vector[2:].index_select(0, (vector[2:] != 0).long().argmax().view(1))
            known = torch.cat([ids == first, torch.ones(1, dtype=torch.bool, device=norm.device)])
            index = known.long().argmax()  # the first that is true
            index = torch.where(is_here & (index == len(ids)), record[3], index)
            record[2:] = torch.where(found_inf != 0, torch.stack([record[1], index]), record[2:])

    def ids_of(self, names: Sequence[str]) -> Tensor:
        """Returns a number for each parameter, fp64. On every rank that holds the parameter it is the same."""
        keys = [f"{name} {holders}".encode() for name, holders in zip(names, self.holders, strict=False)]
        ids = [1 + int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") for key in keys]
        return torch.tensor(ids, dtype=torch.float64, device=self.device)


def of_dtensors(tensors: Sequence[Tensor]) -> Shards | None:
    """Returns how the ranks of all DTensors add up, or None if no tensor is spread over several ranks.

    Other tensors, and DTensors on a slice of a mesh, are taken to be the same on all other ranks of the root.
    """
    places = [(t.device_mesh, t.placements) if isinstance(t, DTensor) else None for t in tensors]
    meshes = list(dict.fromkeys(mesh for mesh, _ in filter(None, places)))
    # Every rank has to go through groups in the same order, but its parameters may be in another one.
    meshes.sort(key=lambda mesh: (-mesh.size(), mesh.ndim, mesh.mesh_dim_names or (), tuple(mesh.shape)))
    root_of = {mesh: torch_private.root_mesh(mesh) for mesh in meshes}
    own = [mesh for mesh in meshes if mesh.get_coordinate() is not None]  # a rank outside of a mesh holds nothing of it
    spans = {
        root: _span(root, [mesh for mesh in own if root_of[mesh] == root]) for root in (root_of[mesh] for mesh in own)
    }
    order = list(spans)
    if len(order) > 1:
        order.sort(key=lambda root: (-len(spans[root].ranks), root.ndim, _ranks(root), root.mesh_dim_names or ()))
    everyone = spans[order[0]].ranks if order else (dist.get_rank(),) if meshes else ()
    others = [tuple(sorted(_ranks(mesh))) for mesh in meshes if mesh not in own]
    if len(everyone) < 2 and not others:
        return None

    # By place: how often this rank counts the squares there, and the ranks that hold it.
    counts: dict[tuple[DeviceMesh, tuple[Placement, ...]] | None, tuple[float, tuple[int, ...]]]
    counts = {None: (1 / len(everyone), everyone)}
    for mesh, placements in filter(None, dict.fromkeys(places)):
        holders = spans[root_of[mesh]].ranks if mesh in own else everyone
        parts = math.prod(mesh.size(d) for d, p in enumerate(placements) if _cuts(p))
        counts[mesh, placements] = parts / len(holders), holders
    device = _device(tensors)
    sets = list(dict.fromkeys([*(spans[root].ranks for root in order), *others]))
    problem, is_right_here = "", False
    if not all(set(ranks) <= set(everyone) for ranks in sets):
        groups = [] if any(not set(ranks) <= set(everyone) for ranks in others) else _all_of(own)
        problem = (
            "the device meshes of the parameters must not overlap only in part or be disjoint, since no rank knows "
            f"them all, got meshes of the ranks {', '.join(str(list(ranks)) for ranks in sets)}; put all parameters on "
            "one mesh, or on slices of it"
        )
    else:
        problem = next(filter(None, (spans[root].problem for root in order)), "")
        found = _groups(order[0], own, spans[order[0]], device.type)
        groups, is_right_here = found or _all_of(own), found is not None
    weights, of_tensor = zip(*(counts[place] for place in places), strict=True)
    shards = Shards(groups, device, list(weights), list(of_tensor), problem, is_right_here)
    return _reducible(shards)


def of_parts(tensors: Sequence[Tensor], group: ProcessGroup) -> Shards | None:
    """Returns how the ranks of a group add up. Their tensors are different parts of a list, or shards of FSDP1.

    If there are shards of FSDP1, all other tensors are taken to be the same on all ranks. None if the group has one
    rank.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return None
    flattened = any(map(torch_private.is_flattened_by_fsdp1, tensors))
    is_cut = torch_private.are_cut_by_fsdp1(tensors) if flattened else [True] * len(tensors)
    weights = [1.0 if cut else 1 / size for cut in is_cut]
    # A rank without tensors takes the device that the others have.
    has_gpu = "cuda" in _backends(group) and torch.cuda.is_available()
    device = _device(tensors) if tensors else torch.device("cuda" if has_gpu else "cpu")
    return _reducible(Shards([group], device, weights, [(dist.get_rank(),)] * len(tensors)))


class _Span(NamedTuple):
    """The ranks of a root that hold parameters, or copies of them, as far as one rank can tell."""

    ranks: tuple[int, ...]  # sorted
    dims: list[int]  # the dimensions of the root over which these ranks go; none if they are no slice of it
    problem: str  # along which dimensions of the root there is no parameter, in words; or ""


def _span(root: DeviceMesh, meshes: Iterable[DeviceMesh]) -> _Span:
    """Returns the ranks of `root` over which parameters on `meshes` are spread. `meshes` are slices of `root`.

    If one parameter is on a slice along "dp", and another on a slice along "tp", the result has the ranks of both
    dimensions. Along a dimension without a parameter, ranks may hold other parameters, for example as stages of a
    pipeline.
    """
    all_ranks = _ranks(root)  # in a variable, since reading the ranks of a mesh takes 18 us
    reached = {rank for mesh in meshes for rank in (all_ranks if mesh == root else _ranks(mesh))}
    every = dict(zip(itertools.product(*map(range, root.shape)), all_ranks, strict=True))
    seen = [{place[d] for place, rank in every.items() if rank in reached} for d in range(root.ndim)]
    lacking = [d for d in range(root.ndim) if len(seen[d]) < root.size(d)]
    if any(len(seen[d]) > 1 for d in lacking):  # a part of a dimension, as `DeviceMesh._unflatten` makes it
        ranks, dims = reached, []
    else:
        ranks = {rank for place, rank in every.items() if all(place[d] in seen[d] for d in lacking)}
        dims = [d for d in range(root.ndim) if d not in lacking]
    if not lacking:
        return _Span(tuple(sorted(ranks)), dims, "")
    names = root.mesh_dim_names or [f"dimension {d}" for d in range(root.ndim)]
    problem = (
        f"the parameters must be spread over all dimensions of their device mesh, got {root} with none along "
        f"{', '.join(names[d] for d in lacking)}, where other ranks may hold other parameters; if they hold copies, "
        "call amp_kernels.clip_grad_norm_ before the step"
    )
    return _Span(tuple(sorted(ranks)), dims, problem)


def _device(tensors: Sequence[Tensor]) -> torch.device:
    devices = [t.device for t in tensors if not t.is_meta]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _reducible(shards: Shards) -> Shards:
    """Returns `shards`, without groups if one of them cannot reduce tensors on the device."""
    kind = shards.device.type
    lacking = next((found for group in shards.groups if kind not in (found := _backends(group))), None)
    if lacking is None:
        return shards
    problem = (
        f"the process groups of the parameters must reduce {kind} tensors, got one with the backends {lacking}; call "
        f"init_process_group with a backend for {kind} too, such as 'cpu:gloo,cuda:nccl'"
    )
    return shards._replace(groups=[], problem=problem)


def _ranks(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _cuts(placement: Placement) -> bool:
    # `is_shard()` is False for the strided shards that FSDP2 makes of a dimension that is already cut.
    return not (placement.is_replicate() or placement.is_partial())


def _groups(root: DeviceMesh, meshes: Sequence[DeviceMesh], span: _Span, kind: str) -> list[ProcessGroup] | None:
    """Returns one group with exactly the ranks of `span`, and a backend for devices of `kind`.

    If there is none, returns several groups. A sum over one after the other counts each rank once. Returns None if
    there are no such groups.
    """
    # All ranks know the first two. Of meshes with all ranks each rank should know the same ones.
    flat = [mesh.get_group(0) for mesh in meshes if mesh.ndim == 1]
    for group in filter(None, (root.get_group(0) if root.ndim == 1 else None, dist.group.WORLD, *flat)):
        if sorted(dist.get_process_group_ranks(group)) == list(span.ranks) and kind in _backends(group):
            return [group]
    # All ranks must go through the dimensions in the same order. Groups that are sorted by their ranks would not do: on
    # the mesh [[0, 1], [2, 3]] rank 0 would begin with {0, 1}, and rank 3 with {1, 3}.
    if span.dims:
        return [root.get_group(d) for d in span.dims if root.size(d) > 1]
    whole = next((mesh for mesh in meshes if sorted(_ranks(mesh)) == list(span.ranks)), None)
    return None if whole is None else [whole.get_group(d) for d in range(whole.ndim) if whole.size(d) > 1]


def _all_of(meshes: Iterable[DeviceMesh]) -> list[ProcessGroup]:
    groups = [mesh.get_group(d) for mesh in meshes for d in range(mesh.ndim) if mesh.size(d) > 1]
    return list({tuple(dist.get_process_group_ranks(group)): group for group in groups}.values())


def has_ranks() -> bool:
    """Returns whether this process is a rank of a process group."""
    return dist.is_available() and dist.is_initialized()


def check_group(caller: str, name: str, group: object, device_type: str | None = None) -> None:
    """Raises an error unless `group` is a process group of this rank, and reduces tensors on `device_type`."""
    if not isinstance(group, ProcessGroup):
        is_of_others = group == dist.GroupMember.NON_GROUP_MEMBER
        got = "a group without this rank" if is_of_others else f"a {type(group).__name__}"
        raise (ValueError if is_of_others else TypeError)(
            f"{caller}: {name} must be a torch.distributed.ProcessGroup that this rank belongs to, got {got}"
        )
    if device_type is not None and device_type not in (backends := _backends(group)):
        got = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        raise ValueError(
            f"{caller}: {name} must reduce {device_type} tensors, got a group with backends {got}; make it with "
            f"torch.distributed.new_group and a backend for {device_type}"
        )


def _backends(group: ProcessGroup) -> dict[str, str]:
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))
