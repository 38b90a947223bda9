"""Columns that depend on all samples: duplicates by signature, and clusters of embeddings with cosines (SemDeDup).

Shape suffixes: N samples, n samples of a cluster, K clusters, D embedding.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipx.extra.look.duplicates import exact_duplicates, near_duplicates
from clipx.report.console import track

_ROUNDS = 20  # of k-means
_OF_CLUSTER = 256  # embeddings of each cluster with which k-means is computed, at most
_ROWS = 4096  # of a product of embeddings


def duplicate_columns(signatures: NDArray[np.void], index_N: NDArray[np.int64]) -> dict[str, pa.Array]:
    """Returns for each sample the index of the first one with the same file, and with nearly the same picture.

    Null for the first one, and for an unusable sample. `signatures`: rows of SIGNATURE. index_N: the index of each row
    of the table.
    """
    first = {
        "duplicate_of": exact_duplicates(signatures["digest"]),
        "near_duplicate_of": near_duplicates(signatures["hash"], signatures["colours"]),
    }
    places, columns = signatures["index"], {}
    for name, number in first.items():
        found_N = np.zeros(len(index_N), dtype=np.int64)
        missing_N = np.ones(len(index_N), dtype=bool)
        found_N[places] = index_N[places[number]]
        missing_N[places] = number == np.arange(len(number))
        columns[name] = pa.array(found_N, pa.int64(), mask=missing_N)
    return columns


def semantic_columns(
    image_ND: NDArray[np.float16], clusters: int, seed: int, device: torch.device
) -> dict[str, pa.Array]:
    """Returns the cluster of each sample, its cosine with the centre, and its largest cosine with an earlier sample.

    As in SemDeDup (arXiv:2303.09540): the samples of a cluster are ordered by their cosine with the centre, the lowest
    first; -1 of the first one. Without the samples above a threshold, no two samples of a cluster are closer than the
    threshold, and the remaining ones are far from the centre. Null for an unusable sample.
    """
    missing_N = np.isnan(image_ND).any(1)
    usable = np.flatnonzero(~missing_N)
    centre_KD = k_means(image_ND[usable], min(clusters, len(usable)), seed, device)
    cluster_N = np.zeros(len(image_ND), dtype=np.int32)
    central_N, near_N = (np.zeros(len(image_ND), dtype=np.float32) for _ in range(2))
    for at in range(0, len(usable), _ROWS):
        rows = usable[at : at + _ROWS]
        cosine, cluster = (_rows(image_ND[rows], device) @ centre_KD.T).max(1)
        cluster_N[rows], central_N[rows] = cluster.cpu().numpy(), cosine.cpu().numpy()
    ordered = usable[np.lexsort((usable, central_N[usable], cluster_N[usable]))]
    ends = np.flatnonzero(np.diff(cluster_N[ordered])) + 1
    groups = np.split(ordered, ends)
    for members in track(groups, "comparing the samples of clusters", len(usable), "samples", len):
        near_N[members] = _earlier(_rows(image_ND[members], device))
    return {
        "cluster": pa.array(cluster_N, mask=missing_N),
        "cluster_similarity": pa.array(central_N, mask=missing_N),
        "semantic_similarity": pa.array(near_N, mask=missing_N),
    }


def k_means(image_ND: NDArray[np.float16], clusters: int, seed: int, device: torch.device) -> Tensor:
    """Returns the centres [K, D] of spherical k-means, of unit norm, of at most 256 K embeddings drawn by the seed."""
    generator = np.random.default_rng(seed)
    drawn = np.sort(generator.permutation(len(image_ND))[: clusters * _OF_CLUSTER])
    sample_ND = _rows(image_ND[drawn], device)
    centre_KD = sample_ND[np.sort(generator.permutation(len(drawn))[:clusters])]
    for _ in track(range(_ROUNDS), "clustering", _ROUNDS, "rounds"):
        cluster_N = torch.cat([(rows @ centre_KD.T).argmax(1) for rows in sample_ND.split(_ROWS)])
        sum_KD = torch.zeros_like(centre_KD).index_add_(0, cluster_N, sample_ND)
        empty_K = torch.bincount(cluster_N, minlength=clusters) == 0
        moved_KD = torch.where(empty_K[:, None], centre_KD, torch.nn.functional.normalize(sum_KD, dim=1))
        if torch.equal(moved_KD, centre_KD):
            break
        centre_KD = moved_KD
    return centre_KD


def _earlier(image_nD: Tensor) -> NDArray[np.float32]:
    """Returns the largest cosine of each row with an earlier one, -1 for the first."""
    found = list[Tensor]()
    for at in range(0, len(image_nD), _ROWS):
        rows = image_nD[at : at + _ROWS]
        cosine = rows @ image_nD[: at + len(rows)].T
        earlier = torch.arange(cosine.shape[1], device=cosine.device) < torch.arange(
            at, at + len(rows), device=cosine.device
        ).unsqueeze(1)
        found.append(cosine.masked_fill(~earlier, -1.0).max(1).values.clamp(-1, 1))
    largest: NDArray[np.float32] = torch.cat(found).cpu().numpy()
    return largest


def _rows(image_ND: NDArray[np.float16], device: torch.device) -> Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(image_ND).to(device).float(), dim=1)
