"""Finds images that are copies of others, exactly or nearly: encoded again, scaled or mirrored."""

from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample

from ddp_trainer.progress import show_progress
from ddp_trainer.tools.inspect.scan import SIDE, Array, Scan

CLUSTER = 200
"""Mean number of images of a cluster, within which all pairs are compared."""
SAMPLE = 50
"""Number of images for each cluster from which its center, and the components, are computed."""
LISTS = 3
"""Number of clusters that an image is in."""
COMPONENTS = 100
"""Number of principal components of the symmetric part of images, and of the antisymmetric one."""
NEIGHBORS = 0.9
"""The correlation of neighboring pixels of a natural image at half the size of a thumbnail."""
EQUAL = 0.94
"""The similarity above which images are near copies, see `Features`."""
CROP = 0.965
"""The side of the crops of an image that are compared with whole other images."""


def exact_copies(scan: Scan) -> list[list[int]]:
    """Return the groups of images with the same pixels, each as places in `scan`."""
    _, numbers, sizes = np.unique(scan.images["digest"], return_inverse=True, return_counts=True)
    order = np.argsort(numbers, kind="stable")
    groups = np.split(order, np.cumsum(sizes)[:-1])
    return [group.tolist() for group in groups if len(group) > 1]


def near_copies(scan: Scan) -> list[tuple[int, int, float]]:
    """Return the pairs of images that are near copies: their places, and their similarity.

    Of images with the same pixels, only the first one is compared.
    """
    _, first = np.unique(scan.images["digest"], return_index=True)
    first.sort()
    if len(first) < 2:
        return []
    num_clusters = max(1, len(first) // CLUSTER)
    sample = np.random.default_rng(0).permutation(first)[: max(1000, SAMPLE * num_clusters)]
    thumbs = scan.images["thumb"]
    points = thumbs[sample]
    features = Features(points)
    found: dict[tuple[int, int], float] = {}
    with show_progress("comparing images", total=num_clusters) as advance:
        for places in clusters(thumbs, first, points, num_clusters):
            for a, b, score in similar_pairs(features, thumbs[places]):
                pair = (int(min(places[a], places[b])), int(max(places[a], places[b])))
                found[pair] = max(score, found.get(pair, 0.0))
            advance(1)
    return [(a, b, score) for (a, b), score in sorted(found.items())]


def half_size(thumbs: Array) -> Tensor:
    """Return images at half their size: uint8 [N, SIDE, SIDE] -> float32 [N, SIDE/2, SIDE/2]."""
    return avg_pool2d(torch.from_numpy(thumbs).float(), 2)


def halves(small: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric and the antisymmetric part of images, float32 [N, D] each.

    The images, [N, SIDE/2, SIDE/2], first get the mean 0 and the norm 1. Mirroring an image changes
    the sign of its antisymmetric part, and nothing else.
    """
    small = small - small.mean((1, 2), keepdim=True)
    small /= small.flatten(1).norm(dim=1).clamp(min=1e-6)[:, None, None]
    return mirror_parts(small)


def mirror_parts(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the symmetric and the antisymmetric part of images: [N, H, W] -> [N, H·W/2] each."""
    left, right = images.chunk(2, dim=2)
    right = right.flip(2)
    scale = 0.5**0.5
    return ((left + right) * scale).flatten(1), ((left - right) * scale).flatten(1)


def natural_covariances() -> list[Tensor]:
    """Return the covariance of both parts of natural images, float32 [D, D] each, up to a factor.

    The correlation of pixels falls exponentially with their distance.

    Source: Field, Relations between the Statistics of Natural Images and the Response Properties of
    Cortical Cells, 1987.
    """
    side = SIDE // 2
    axis = torch.arange(side).float()
    points = torch.cartesian_prod(axis, axis)
    whole = NEIGHBORS ** torch.cdist(points, points)
    columns = (part.T.reshape(-1, side, side) for part in mirror_parts(whole.view(-1, side, side)))
    return [mirror_parts(part)[place] for place, part in enumerate(columns)]


class Features:
    """Whitened principal components of images: those of different images are hardly correlated.

    The similarity of two images is the cosine of their features, or of those of the mirrored image.

    Source: Jégou and Chum, Negative Evidences and Co-occurences in Image Retrieval: the Benefit of
    PCA and Whitening, 2012.
    """

    def __init__(self, thumbs: Array) -> None:
        """thumbs: a sample of the images, uint8 [N, SIDE, SIDE]."""
        symmetric, antisymmetric = halves(half_size(thumbs))
        self.mean = symmetric.mean(0) * len(thumbs) / (len(thumbs) + len(symmetric[0]))
        priors = natural_covariances()
        self.bases = [
            whitening(values, prior)
            for values, prior in zip((symmetric - self.mean, antisymmetric), priors, strict=True)
        ]

    def of(self, small: Tensor) -> tuple[Tensor, Tensor]:
        """Return both parts of the features, float32 [N, D]; together, they have the norm 1.

        small: images at half the size of thumbnails, [N, SIDE/2, SIDE/2].
        """
        symmetric, antisymmetric = halves(small)
        one = (symmetric - self.mean) @ self.bases[0]
        other = antisymmetric @ self.bases[1]
        norm = (one.square().sum(1) + other.square().sum(1)).sqrt().clamp(min=1e-6)[:, None]
        return one / norm, other / norm


def whitening(values: Tensor, prior: Tensor) -> Tensor:
    """Return a matrix, [D, components], after which `values`, [N, D], have about the covariance 1.

    prior: a covariance that counts as much as D values, because the components of few images would
    be the differences between an image and its copies.
    """
    weight = len(prior) / len(values)
    prior = prior * (values.square().sum() / len(values) / prior.trace())
    covariance = (values.T @ values / len(values) + weight * prior) / (1 + weight)
    variances, vectors = torch.linalg.eigh(covariance)
    return (vectors / variances.clamp(min=1e-5 * variances[-1]).sqrt())[:, -COMPONENTS:]


def clusters(thumbs: Array, places: Array, points: Array, num_clusters: int) -> Iterator[Array]:
    """Yield groups of similar images, as places in `thumbs`; an image is in `LISTS` of them.

    points: a sample of the images.

    Source: Jégou, Douze and Schmid, Product Quantization for Nearest Neighbor Search, 2011: an
    index with inverted lists, and several of them for each query.
    """
    sample = halves(half_size(points))[0]
    centers = sample[:num_clusters].clone()
    for _ in range(5):
        nearest = distances(sample, centers).argmin(1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, sample)
        sizes = torch.bincount(nearest, minlength=num_clusters)[:, None]
        centers = torch.where(sizes > 0, sums / sizes.clamp(min=1), centers)
    lists = []
    for part in np.array_split(places, max(1, len(places) // 8192)):
        images = halves(half_size(thumbs[part]))[0]
        lists.append(
            distances(images, centers).topk(min(LISTS, num_clusters), largest=False).indices
        )
    assigned = torch.cat(lists).numpy()
    for number in range(num_clusters):
        yield places[(assigned == number).any(1)]


def distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return |center - point|² - |point|² for each point and center, [N, K].

    It has the order of the distances of a point from the centers.
    """
    return centers.square().sum(1) - 2 * points @ centers.T


def similar_pairs(features: Features, thumbs: Array) -> Iterator[tuple[int, int, float]]:
    """Yield the near copies among `thumbs`, and their similarity."""
    one, other = features.of(half_size(thumbs))
    for view in views(thumbs):
        view_one, view_other = features.of(view)
        similarity = view_one @ one.T + (view_other @ other.T).abs()
        rows, columns = (similarity > EQUAL).nonzero(as_tuple=True)
        scores = similarity[rows, columns].tolist()
        for a, b, score in zip(rows.tolist(), columns.tolist(), scores, strict=True):
            if a != b:
                yield a, b, score


def views(thumbs: Array) -> Iterator[Tensor]:
    """Yield images, then five crops of them, at half size: float32 [N, SIDE/2, SIDE/2]."""
    yield half_size(thumbs)
    images = torch.from_numpy(thumbs).float()
    begin, middle, end = map(axis_crop, (-1, 0, 1))
    for rows, columns in ((middle, middle), *product((begin, end), repeat=2)):
        yield rows.T @ (images @ columns)


@cache
def axis_crop(side: int) -> Tensor:
    """Return the matrix that crops an axis at its begin, middle or end, and halves its size.

    float32 [SIDE, SIDE/2]; images, [N, SIDE, SIDE], are multiplied by it from both sides. That is
    faster than grid_sample for each image.

    side: -1, 0 or 1.
    """
    box = torch.tensor([[[CROP, 0, side * (1 - CROP)], [0, 1, 0]]])
    grid = affine_grid(box, [1, 1, SIDE, SIDE], False)
    one_by_one = torch.eye(SIDE)[None, None]
    cropped = grid_sample(one_by_one, grid, padding_mode="border", align_corners=False)
    return avg_pool2d(cropped, (1, 2))[0, 0]
