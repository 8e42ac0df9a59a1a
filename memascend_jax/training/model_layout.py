# SPDX-License-Identifier: Apache-2.0
"""How a model's tensors are cut into what streams: stage parts for compute, groups of tiles for the optimizer. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from memascend_jax.models.adapters import Adapters, model_tensors
from memascend_jax.models.model_config import ModelConfig
from memascend_jax.models.shapes import EMBED_NAME, NORM_NAME, TensorShape, head_weight_name
from memascend_jax.optim.state_format import BLOCK_BYTES, Leaf, StateFormat, itemsize, tile_elements
from memascend_jax.training.stage_schedule import HEAD, LAYER, NORM, StageKey
from memascend_jax.units import round_up

_LAYER_PREFIX = "model.layers."


@dataclass(frozen=True, slots=True)
class StagePart:
    """A tensor, or whole rows of one, that a stage reads.

    Attributes:
        local_name: key in the dictionary that the stage function receives.
        tensor: the store's name.
        start: first element of the flattened tensor; a multiple of the block.
        shape: shape of what is read; ``padded_rows`` more rows of zeros follow in memory.
    """

    local_name: str
    tensor: str
    start: int
    shape: tuple[int, ...]
    padded_rows: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def memory_shape(self) -> tuple[int, ...]:
        return (self.shape[0] + self.padded_rows, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class UpdatePiece:
    """One tile of one parameter inside an update slot; offsets are bytes from the slot's start."""

    tensor: str
    tile: int
    start: int
    n_elements: int
    offsets: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """The tiles that are read, updated and written together; ``nbytes`` is what they need in memory."""

    pieces: tuple[UpdatePiece, ...]
    nbytes: int

    def __str__(self) -> str:
        first, more = self.pieces[0], len(self.pieces) - 1
        return f"{first.tensor}[{first.tile}]" + (f" and {more} more" if more else "")


GRADIENT, PARAMETER = "gradient", "parameter"


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The cut of one model for one state format.

    Attributes:
        tensors: every parameter, in forward order: embedding, layers, final norm, untied head.
        update_groups: in the order in which the next forward needs them: layers, final norm, head. The embedding comes
            last, tied or not; the rows that a step uses are updated ahead of it.
        tile_elements: optimizer tile of each parameter, in elements.
        head_rows: vocabulary rows of one head tile.
        frozen: tensors that are never trained: parameters without state, gradient and update group.
        adapters: LoRA adapters, whose factors are tensors of the layers; None: there are none.
    """

    config: ModelConfig
    format: StateFormat
    tensors: tuple[TensorShape, ...]
    tile_elements: Mapping[str, int]
    head_rows: int
    n_head_tiles: int
    stage_parts: Mapping[StageKey, tuple[StagePart, ...]]
    update_groups: tuple[UpdateGroup, ...]
    frozen: frozenset[str] = frozenset()
    adapters: Adapters | None = None

    @property
    def head_tensor(self) -> str:
        return head_weight_name(self.config)

    @property
    def tied(self) -> bool:
        return bool(self.config.tie_word_embeddings)

    @property
    def n_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def n_parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @property
    def trained(self) -> tuple[TensorShape, ...]:
        """The tensors that are not frozen, in forward order."""
        return tuple(tensor for tensor in self.tensors if tensor.name not in self.frozen)

    @property
    def n_trained(self) -> int:
        return sum(tensor.elements for tensor in self.trained)

    def is_trained(self, tensor: str) -> bool:
        return tensor not in self.frozen

    def trained_parts(self, key: StageKey) -> tuple[StagePart, ...]:
        """Returns the parts of a stage that have a gradient."""
        return tuple(part for part in self.stage_parts[key] if part.tensor not in self.frozen)

    def leaves_of(self, tensor: str) -> tuple[Leaf, ...]:
        """Returns the state leaves of ``tensor``: the format's, of a frozen one none."""
        return () if tensor in self.frozen else self.format.leaves

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        return next(known.shape for known in self.tensors if known.name == tensor)

    def leaf_dtype(self, leaf: str) -> str:
        """Returns the dtype of ``PARAMETER``, ``GRADIENT`` or a leaf of the state format."""
        own = {PARAMETER: self.format.param_dtype, GRADIENT: self.format.grad_dtype}
        return own.get(leaf) or self.format.leaf(leaf).dtype

    def leaf_shape(self, tensor: str, leaf: str) -> tuple[int, ...]:
        """Returns the shape of ``PARAMETER`` or a leaf of ``tensor``: the tensor's, or of scales ``[groups, 2]``."""
        shape = self.shape_of(tensor)
        known = None if leaf == PARAMETER else self.format.leaf(leaf)
        if known is None or known.per == 1:
            return shape
        return known.total(math.prod(shape), self.tile_elements[tensor]) // known.width, known.width

    def leaf_span(self, piece: UpdatePiece, leaf: str) -> tuple[int, int]:
        """Returns first value and number of values of ``PARAMETER``, ``GRADIENT`` or a leaf of ``piece``."""
        if leaf in (PARAMETER, GRADIENT):
            return piece.start, piece.n_elements
        elements = math.prod(self.shape_of(piece.tensor))
        return self.format.leaf(leaf).span(piece.tile, elements, self.tile_elements[piece.tensor])


def leaf_name(tensor: str, leaf: str) -> str:
    """Returns the store's name of a parameter (``PARAMETER``) or of one of its state leaves."""
    return tensor if leaf == PARAMETER else tensor + leaf


def plan_layout(
    config: ModelConfig,
    fmt: StateFormat,
    *,
    target_tile_elements: int,
    target_head_bytes: int,
    frozen: frozenset[str] = frozenset(),
    adapters: Adapters | None = None,
) -> ModelLayout:
    """Returns the cut of ``config`` into stage parts and update groups.

    Args:
        target_tile_elements: size that optimizer tiles stay at or under where rows allow.
        target_head_bytes: size that a vocabulary tile of the head stays at or under, at least one aligned row group.
        frozen: names of tensors that are not trained; not all of them.
        adapters: LoRA adapters beside the model's own tensors.
    """
    tensors = tuple(model_tensors(config, adapters))
    trained = [tensor for tensor in tensors if tensor.name not in frozen]
    tiles = {tensor.name: tile_elements(tensor.shape, target_tile_elements) for tensor in tensors}
    row_bytes = config.hidden_size * itemsize(fmt.param_dtype)
    tile_rows, apart = divmod(tiles[head_weight_name(config)], config.hidden_size)
    head_rows = _head_rows(config.vocab_size, row_bytes, target_head_bytes, 0 if apart else tile_rows)
    n_head_tiles = -(-config.vocab_size // head_rows)
    return ModelLayout(
        config=config,
        format=fmt,
        tensors=tensors,
        tile_elements=tiles,
        head_rows=head_rows,
        n_head_tiles=n_head_tiles,
        stage_parts=dict(_stage_parts(config, tensors, head_rows, n_head_tiles)),
        update_groups=tuple(_update_groups(trained, tiles, fmt, target_tile_elements)),
        frozen=frozen,
        adapters=adapters,
    )


def _head_rows(vocab_size: int, row_bytes: int, target_bytes: int, tile_rows: int) -> int:
    """Returns the rows of a head tile: whole optimizer tiles where one of ``tile_rows`` rows is small enough."""
    # A tile begins on a block: rows come in groups whose bytes are whole blocks (in bf16 and wider).
    group = BLOCK_BYTES // math.gcd(BLOCK_BYTES, row_bytes)
    if tile_rows > 0 and tile_rows * row_bytes <= target_bytes:
        group = tile_rows
    if vocab_size <= group:
        return vocab_size
    n_tiles = max(1, -(-vocab_size * row_bytes // target_bytes))
    rows = round_up(-(-vocab_size // n_tiles), group)
    return min(rows, vocab_size)


def _stage_parts(
    config: ModelConfig, tensors: Sequence[TensorShape], head_rows: int, n_head_tiles: int
) -> Iterator[tuple[StageKey, tuple[StagePart, ...]]]:
    by_layer: dict[int, list[StagePart]] = {}
    for tensor in tensors:
        if tensor.name.startswith(_LAYER_PREFIX):
            number, local = tensor.name.removeprefix(_LAYER_PREFIX).split(".", 1)
            by_layer.setdefault(int(number), []).append(StagePart(local, tensor.name, 0, tensor.shape))
    for layer, parts in by_layer.items():
        yield StageKey(LAYER, layer), tuple(parts)
    yield StageKey(NORM, 0), (StagePart("weight", NORM_NAME, 0, (config.hidden_size,)),)
    head = head_weight_name(config)
    for index in range(n_head_tiles):
        first = index * head_rows
        rows = min(head_rows, config.vocab_size - first)
        part = StagePart(
            "weight", head, first * config.hidden_size, (rows, config.hidden_size), head_rows - rows
        )
        yield StageKey(HEAD, index), (part,)


def _update_groups(
    tensors: Sequence[TensorShape], tiles: Mapping[str, int], fmt: StateFormat, target: int
) -> Iterator[UpdateGroup]:
    """Groups never cross stages, so that a stage's parameters never wait for those of the next."""
    pieces: list[UpdatePiece] = []
    used = elements = 0
    stage = ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.name == EMBED_NAME):
        total, size = math.prod(tensor.shape), tiles[tensor.name]
        for tile, start in enumerate(range(0, total, size)):
            n = min(size, total - start)
            if pieces and (elements + n > target or _stage_name(tensor.name) != stage):
                yield UpdateGroup(tuple(pieces), used)
                pieces, used, elements = [], 0, 0
            stage = _stage_name(tensor.name)
            offsets: dict[str, int] = {}
            for leaf in _leaves(fmt):
                offsets[leaf.suffix] = used
                used += round_up(leaf.values(n) * itemsize(leaf.dtype), BLOCK_BYTES)
            pieces.append(UpdatePiece(tensor.name, tile, start, n, offsets))
            elements += n
    if pieces:
        yield UpdateGroup(tuple(pieces), used)


def _stage_name(tensor: str) -> str:
    """Returns a layer's prefix, such as ``model.layers.3``; any other tensor is a stage of its own."""
    if tensor.startswith(_LAYER_PREFIX):
        return _LAYER_PREFIX + tensor.removeprefix(_LAYER_PREFIX).split(".", 1)[0]
    return tensor


def _leaves(fmt: StateFormat) -> Iterator[Leaf]:
    yield Leaf(PARAMETER, fmt.param_dtype)
    yield Leaf(GRADIENT, fmt.grad_dtype)
    yield from fmt.leaves
