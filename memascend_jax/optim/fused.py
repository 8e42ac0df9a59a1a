# SPDX-License-Identifier: Apache-2.0
"""What a native kernel needs to know of an optimizer, and the update of one tile with fp32 state.

jax is reached only for the numbers of a step, which are rounded as optax rounds them. What does not live here: the
optax transforms that carry such a description (``optim.transforms``), and the compact formats (``optim.adamw``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from memascend_jax._native import _core

#: ``adam`` is AdamW too: its weight decay may be zero.
Rule = Literal["adam", "lion", "sgd"]
Schedule = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class FusedUpdate:
    """An optimizer that a fused kernel can carry out; numbers are Python floats.

    With ``g`` the scaled gradient, ``p`` the parameter, ``t`` the number of the update from 1, ``lr`` and ``wd`` the
    values of their schedules at ``t - 1``::

        adam  mu = b1 mu + (1 - b1) g;  nu = b2 nu + (1 - b2) g²
              m  = mu / (1 - b1^t), or with Nesterov b1 mu / (1 - b1^(t+1)) + (1 - b1) g / (1 - b1^t)
              p  = p - lr (m / (sqrt(nu / (1 - b2^t) + eps_root) + eps) + wd p)
        lion  p  = p - lr (sign(b1 mu + (1 - b1) g) + wd p);  mu = b2 mu + (1 - b2) g
        sgd   trace = b1 trace + g;  p = p - lr trace, with Nesterov lr (b1 trace + g), without momentum lr g

    Attributes:
        rule: which of the three.
        learning_rate: a number or optax schedule.
        b1, b2, eps, eps_root: as above; ``b1`` of sgd is its momentum, None for none.
        weight_decay: a number or optax schedule.
        mask: which leaves are decayed, as ``optax.adamw`` takes it: a pytree (or prefix) of booleans, a function of the
            parameters that returns one, or None for all.
        nesterov: as above.
    """

    rule: Rule
    learning_rate: float | Schedule
    b1: float | None = None
    b2: float = 0.0
    eps: float = 0.0
    eps_root: float = 0.0
    weight_decay: float | Schedule = 0.0
    mask: Any = None
    nesterov: bool = False

    @property
    def state_leaves(self) -> tuple[str, ...]:
        """Names of the arrays of the parameter's shape that the state holds, as in optax's state."""
        if self.rule == "adam":
            return ("mu", "nu")
        if self.rule == "lion":
            return ("mu",)
        return () if self.b1 is None else ("trace",)

    @property
    def kernel(self) -> str:
        """The native kernel's name."""
        if self.rule == "sgd":
            if self.b1 is None:
                return "sgd"
            return "nesterov" if self.nesterov else "momentum"
        return "adam_nesterov" if self.rule == "adam" and self.nesterov else self.rule

    def numbers(self, count: int, grad_scale: float = 1.0) -> StepNumbers:
        """Returns the numbers of update ``count``, from 1, rounded as optax does on float32.

        Args:
            grad_scale: factor on every gradient, such as a clip's.

        Raises:
            ValueError: a schedule returned what is not a finite number.
        """
        bias1, bias1_next, bias2 = 1.0, 1.0, 1.0
        if self.rule == "adam":
            assert self.b1 is not None
            bias1, bias1_next, bias2 = _biases(((self.b1, count), (self.b1, count + 1), (self.b2, count)))
        return StepNumbers(
            learning_rate=_scheduled("learning rate", self.learning_rate, count),
            weight_decay=_scheduled("weight decay", self.weight_decay, count),
            bias1=bias1,
            bias1_next=bias1_next,
            bias2=bias2,
            grad_scale=grad_scale,
        )


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """What changes from one update to the next; see ``FusedUpdate``."""

    learning_rate: float
    weight_decay: float
    bias1: float
    bias1_next: float
    bias2: float
    grad_scale: float


@dataclass(frozen=True, slots=True)
class FusedTile:
    """Addresses of one tile in host memory, each aligned to its element; arrays do not overlap.

    Attributes:
        param: fp32 parameters, updated in place.
        grad: gradients, float32, bfloat16 or float16 (``grad_dtype``); widened before anything is computed.
        n_elements: of each array.
        mu: fp32 first moment, of lion its only one, of sgd the trace; 0 where the rule has none.
        nu: fp32 second moment of adam; else 0.
        rounded: where the new parameters go too, rounded to ``rounded_dtype``; 0: nowhere.
    """

    param: int
    grad: int
    n_elements: int
    mu: int = 0
    nu: int = 0
    rounded: int = 0
    grad_dtype: str = "float32"
    rounded_dtype: str = ""


def update_fused_tile(
    update: FusedUpdate, numbers: StepNumbers, tile: FusedTile, *, decayed: bool = True
) -> None:
    """Updates one tile in place, without temporaries; releases the GIL. The tile's memory must stay leased meanwhile.

    The bits do not depend on threads or instruction set. They are optax's up to rounding: bias corrections are
    multiplied with, not divided by, and denormals are flushed to zero as XLA does on CPU.

    Args:
        decayed: whether the mask lets this leaf's weight decay through.
    """
    _core.fused_update(
        kernel=update.kernel,
        param=tile.param,
        mu=tile.mu,
        nu=tile.nu,
        grad=tile.grad,
        n=tile.n_elements,
        grad_dtype=tile.grad_dtype,
        rounded=tile.rounded,
        rounded_dtype=tile.rounded_dtype,
        lr=numbers.learning_rate,
        b1=update.b1 or 0.0,
        b2=update.b2,
        eps=update.eps,
        eps_root=update.eps_root,
        weight_decay=numbers.weight_decay if decayed else 0.0,
        bias1=numbers.bias1,
        bias1_next=numbers.bias1_next,
        bias2=numbers.bias2,
        grad_scale=numbers.grad_scale,
    )


def _scheduled(what: str, value: float | Schedule, count: int) -> float:
    number = float(value(_count_array(count - 1))) if callable(value) else value
    if not math.isfinite(number):
        raise ValueError(f"the schedule's {what} of update {count} is {number}; it must be a finite number")
    return number


def _count_array(count: int) -> Any:
    """A schedule may compute with jnp and with the count's dtype, which optax keeps in int32."""
    import jax.numpy as jnp

    return jnp.asarray(count, jnp.int32)


def _biases(powers: tuple[tuple[float, int], ...]) -> list[float]:
    """Returns ``1 - decay**count`` as optax computes them: in float32, for b2 = 0.999 a hundred-thousandth off."""
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return [float(1 - decay ** _count_array(count)) for decay, count in powers]
