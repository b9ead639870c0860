"""What each operand of the two matrix products is rounded to.

    scores = Q K^T     Q in bf16, or in fp8 with one scale per query and block of 16 heads
    output = P V       P in bf16, or in fp8 after a multiplication by the P scale

K and V are what the cache holds: neither product rounds them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PRECISIONS = ("bf16", "fp8")


@dataclass(frozen=True)
class Recipe:
    """q, p: "bf16" or "fp8". p_scale: what an fp8 P is multiplied by before it is rounded; None takes the profile's.

    Raises ValueError for another precision, a p_scale that is not finite and positive, or one given with a bf16 P.
    """

    q: str = "bf16"
    p: str = "bf16"
    p_scale: float | None = None

    def __post_init__(self):
        for name in ("q", "p"):
            if getattr(self, name) not in PRECISIONS:
                raise ValueError(f"recipe.{name}: got {getattr(self, name)!r}; accepted: {', '.join(PRECISIONS)}")
        if self.p_scale is not None:
            check_p_scale(self.p_scale, "recipe.p_scale")
            if self.p == "bf16":
                raise ValueError(f"recipe.p_scale: got {self.p_scale} with a bf16 P; accepted: None, or p='fp8'")

    @property
    def needs_fp8_cache(self) -> bool:
        return "fp8" in (self.q, self.p)

    @property
    def dots(self) -> str:
        """Which launch configuration serves it: "fp8" where both products run in fp8, else "bf16"."""
        return "fp8" if self.q == self.p == "fp8" else "bf16"


def check_p_scale(value: float, name: str = "p_scale") -> None:
    """ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: got {value!r}; accepted: a finite number above 0")


BF16_DOTS = Recipe()
FP8_DOTS = Recipe(q="fp8", p="fp8")
NAMED = {"bf16": BF16_DOTS, "fp8": FP8_DOTS}
